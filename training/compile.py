"""torch.compile: what it is asked to do, and what it really did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from backends.base import Backend, CompileCache
from recipes.base import Recipe, RecipeError
from training.record import RunFailed
from training.timeline import CompileTotals, difference

_KEPT_COMPILATIONS = 100_000


class CompileInactive(RunFailed):
    """Compilation was asked for and nothing was compiled."""


def compile_keywords(recipe: Recipe, backend: Backend) -> dict[str, Any] | None:
    """Return the keywords for torch.compile, or None in eager mode.

    Raises:
        RecipeError: if the device does not honour one of them.
    """
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
    """

    active: bool
    cache: Callable[[], CompileCache]
    compilations: list[Compilation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache_before = self.cache()
        if self.active:
            from torch._dynamo.utils import set_compilation_metrics_limit

            set_compilation_metrics_limit(_KEPT_COMPILATIONS)
            self._seen = len(self._metrics())

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
        entries = [_describe(entry, 0) for entry in self._metrics()]
        cache = self.cache()
        return CompileTotals(
            compile_seconds=sum(entry.seconds for entry in entries),
            trace_seconds=sum(entry.trace_seconds for entry in entries),
            cache_hits=cache.hits,
            cache_misses=cache.misses,
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

    def report(self) -> dict[str, Any]:
        """Return the compile section of the run record."""
        cache = self.cache()
        hits, misses = difference(cache.hits, self.cache_before.hits), difference(cache.misses, self.cache_before.misses)
        late = [compilation for compilation in self.compilations if compilation.step > 1]
        return {
            "graphs": len(self.compilations),
            "graph_breaks": self.graph_breaks(),
            "compile_seconds": sum(compilation.seconds for compilation in self.compilations),
            "trace_seconds": sum(compilation.trace_seconds for compilation in self.compilations),
            "compilations": [asdict(compilation) for compilation in self.compilations if compilation.step <= 1],
            "late_compiles": [asdict(compilation) for compilation in late],
            "late_compile_seconds": sum(compilation.seconds for compilation in late),
            "cache": {
                "state": cache_state(hits, misses),
                "hits": hits,
                "misses": misses,
                "before": asdict(self.cache_before),
                "after": asdict(cache),
            },
        }


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
