"""torch.compile: what it is asked to do, and what it really did."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backends.base import Backend, CompileCache
from recipes.base import Recipe, RecipeError
from training.cache_files import repair
from training.compile_cache import require_usable
from training.record import RunFailed
from training.timeline import CompileTotals, difference

_KEPT_COMPILATIONS = 100_000


class CompileInactive(RunFailed):
    """Compilation was asked for and nothing was compiled."""


def compile_keywords(recipe: Recipe, backend: Backend) -> dict[str, Any] | None:
    """Return the keywords for torch.compile, or None in eager mode.

    Raises:
        RecipeError: if the device does not honour one of them, or the compile cache's folder cannot be used.
    """
    if recipe.run.mode == "compile" or backend.compiles_eagerly:
        require_usable(backend)
    if recipe.run.mode == "eager":
        return None
    try:
        backend.check_compile(dynamic=False, fullgraph=recipe.compile.fullgraph)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    chosen = recipe.compile.backend or backend.compile_backend
    # The device's own options mean nothing to another compiler.
    own = backend.compile_kwargs() if chosen == backend.compile_backend else {}
    return {"backend": chosen, "dynamic": False, "fullgraph": recipe.compile.fullgraph, **own}


@dataclass(frozen=True)
class Compilation:
    """One graph that was compiled."""

    step: int
    """Optimizer step in which it happened."""
    function: str
    direction: str
    """forward or backward. A graph compiled with both at once is reported as forward."""
    seconds: float
    """Wall seconds, tracing included."""
    trace_seconds: float
    cause: str


@dataclass
class CompileWatch:
    """Reads what Dynamo says of its compilations; costs nothing in eager mode.

    Args:
        active: whether compilation was asked for.
        cache: reads the persistent compile cache.
        counters: its hits and misses alone. It is asked at each mark of the first step, where a walk through the cache's
            folder would be a wait of our own making.
    """

    active: bool
    cache: Callable[[], CompileCache]
    counters: Callable[[], tuple[int | None, int | None]]
    compilations: list[Compilation] = field(default_factory=list)
    first_step: int = 1
    """Of this process: a resumed run begins later."""
    repaired: int = field(init=False)
    """Damaged entries of the cache that this process has removed."""

    def __post_init__(self) -> None:
        self.cache_before = self.cache()
        directory = self.cache_before.directory
        self.repaired = 0 if directory is None else len(repair(Path(directory)))
        if self.repaired:
            self.cache_before = self.cache()
        if self.active:
            from torch._dynamo.utils import set_compilation_metrics_limit

            set_compilation_metrics_limit(_KEPT_COMPILATIONS)
            self._seen = self._before = len(self._metrics())

    def _metrics(self) -> list[Any]:
        from torch._dynamo.utils import get_compilation_metrics

        return get_compilation_metrics()

    def observe(self, step: int) -> list[Compilation]:
        """Return what was compiled since the last call and book it on `step`."""
        if not self.active:
            return []
        new = [_describe(entry, step) for entry in self._metrics()[self._seen :]]
        self._seen += len(new)
        self.compilations += new
        return new

    def totals(self) -> CompileTotals:
        """Return what compiling has cost since this watch began."""
        if not self.active:
            return CompileTotals()
        entries = [_describe(entry, 0) for entry in self._metrics()[self._before :]]
        hits, misses = self.counters()
        return CompileTotals(
            compile_seconds=sum(entry.seconds for entry in entries),
            trace_seconds=sum(entry.trace_seconds for entry in entries),
            cache_hits=hits,
            cache_misses=misses,
        )

    def require_compiled(self) -> None:
        """Refuse to go on as if compiled when nothing was.

        Raises:
            CompileInactive: if compilation was asked for and no graph was compiled so far.
        """
        if self.active and not self.compilations:
            raise CompileInactive(
                "run.mode compile was asked for, but nothing was compiled in the first step; is TORCHDYNAMO_DISABLE or a "
                "compile stance set? Unset it, or ask for --run.mode eager"
            )

    def graph_breaks(self) -> dict[str, int]:
        """Return the reasons for graph breaks with their counts."""
        if not self.active:
            return {}
        from torch._dynamo.utils import counters

        return dict(counters["graph_break"])

    def compile_seconds(self) -> float:
        """Return the seconds of all compilations that were observed."""
        return sum(compilation.seconds for compilation in self.compilations)

    def cache_use(self, cache: CompileCache | None = None) -> CacheUse:
        """Return what this process has asked of the compile cache since this watch began.

        Args:
            cache: as it is now. None: look.
        """
        cache = cache or self.cache()
        hits, misses = difference(cache.hits, self.cache_before.hits), difference(cache.misses, self.cache_before.misses)
        return CacheUse(_identity(cache.directory), hits, misses, self.repaired)

    def report(self, uses: Sequence[CacheUse] = ()) -> dict[str, Any]:
        """Return the compile section of the run record.

        Args:
            uses: of all ranks. None given: this process is the only one.
        """
        cache = self.cache()
        use = self.cache_use(cache)
        late = [compilation for compilation in self.compilations if compilation.step > self.first_step]
        return {
            "graphs": len(self.compilations),
            "graph_breaks": self.graph_breaks(),
            "compile_seconds": self.compile_seconds(),
            "trace_seconds": sum(compilation.trace_seconds for compilation in self.compilations),
            "compilations": [asdict(compilation) for compilation in self.compilations if compilation.step <= self.first_step],
            "late_compiles": [asdict(compilation) for compilation in late],
            "late_compile_seconds": sum(compilation.seconds for compilation in late),
            "cache": {
                "state": cache_state_of_all(uses or [use]),
                "hits": use.hits,
                "misses": use.misses,
                "repaired": sum(each.repaired for each in uses or [use]),
                "before": asdict(self.cache_before),
                "after": asdict(cache),
            },
        }


def _identity(directory: str | None) -> str | None:
    """Return what two ranks have in common if, and only if, they use one folder: its path and its number in the file system."""
    if directory is None:
        return None
    try:
        return f"{directory} {os.stat(directory).st_ino}"
    except OSError:  # nobody has written into it yet
        return f"{directory} on {socket.gethostname()}"


def _describe(entry: Any, step: int) -> Compilation:
    """Translate one torch._dynamo.utils.CompilationMetrics."""
    seconds = (entry.duration_us or 0) / 1e6
    forward = entry.is_forward is not False
    # Only forward graphs are traced from Python; a backward graph arrives at the compile backend already traced.
    traced = seconds - (entry.backend_compile_time_s or 0.0) if forward else 0.0
    where = f"{entry.co_name} ({entry.co_filename})" if entry.co_name else f"graph {entry.compile_id}"
    cause = entry.recompile_reason or entry.fail_reason or ("first call" if forward else "first backward pass")
    return Compilation(step, where, "forward" if forward else "backward", seconds, max(0.0, traced), cause)


def cache_state(hits: int | None, misses: int | None) -> str | None:
    """Return cold (no hit), warm (no miss), partial or unknown; None if the cache was not asked for anything."""
    if hits is None or misses is None:
        return "unknown"
    if hits == misses == 0:
        return None
    return "partial" if hits and misses else "warm" if hits else "cold"


@dataclass(frozen=True)
class CacheUse:
    """What one rank asked of its compile cache."""

    cache: str | None
    """Which cache it is: ranks with the same one share its entries. None: there is none."""
    hits: int | None
    misses: int | None
    repaired: int = 0
    """Damaged entries that it has removed."""


def cache_state_of_all(uses: Sequence[CacheUse]) -> str | None:
    """Return the state in which the ranks together found their caches.

    Of ranks that share a cache one compiles a graph and the others then find it there: a hit on what this very run has written.
    So a shared cache was cold if at least as many graphs were compiled as the rank that asked for most of them needs.
    """
    states = set()
    for cache in {use.cache for use in uses}:
        sharers = [use for use in uses if use.cache == cache]
        known = [(use.hits, use.misses) for use in sharers if use.hits is not None and use.misses is not None]
        if len(known) < len(sharers):
            return "unknown"
        misses, wanted = sum(missed for _, missed in known), max(hit + missed for hit, missed in known)
        states.add(cache_state(max(0, wanted - misses), misses))
    states.discard(None)
    return states.pop() if len(states) == 1 else "partial" if states else None
