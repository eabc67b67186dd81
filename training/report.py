"""From the first line of the record to the last: what a run says of itself, on screen and in record.json."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from backends.base import Backend, EnvironmentVariable
from recipes.base import Recipe
from training import timeline as phases
from training.collateral import cause_in_one_line
from training.compile import CacheUse, CompileWatch
from training.compile_cache import graph_facts, require_cached
from training.flops import NUMERATORS, ModelShape, count_flops, mfu
from training.journal import Journal
from training.record import software
from training.stragglers import Straggler, stragglers
from training.summary import summary
from training.timeline import Timeline
from training.wakeup import undisturbed

if TYPE_CHECKING:
    from backends.peak_flops import Peak
    from training.checkpoint import Checkpointer
    from training.data import PackedBatches
    from training.distributed import Ranks
    from training.stopping import Reason


class ModelFacts(ModelShape, Protocol):
    """What the record says of a model."""

    @property
    def init_std(self) -> float: ...


@dataclass(frozen=True)
class RankFirstStep:
    """One rank's first step, for the comparison with the others'."""

    rank: int
    host: str
    first_step_seconds: float
    time_to_first_step_seconds: float | None
    compile_seconds: float | None
    phases: dict[str, float]
    cache: CacheUse
    compiled_graphs: list[str] | None


@dataclass
class Report:
    """Fills the record. As a context manager it closes the record with the status that the body earned."""

    recipe: Recipe
    backend: Backend
    config: ModelFacts
    data: PackedBatches
    journal: Journal
    timeline: Timeline
    watch: CompileWatch
    environment: Sequence[EnvironmentVariable]
    optimizer_implementation: str
    ranks: Ranks
    checkpointer: Checkpointer
    stragglers: list[Straggler] = field(default_factory=list)
    """Slowest rank of each phase after the first step; empty until the loop is over."""
    stopped: Reason | None = None
    """Why the run ended before its last step, in good order. None: it did not."""
    peaks: list[Peak] = field(default_factory=list)
    first_steps: list[RankFirstStep] = field(default_factory=list)
    """Of all ranks, by rank; empty until the first step is over."""

    def __post_init__(self) -> None:
        self._graphs_before = len(self.backend.compiled_graphs() or ())

    def __enter__(self) -> Report:
        """Print the header and write down what is known before the first step."""
        watchdog, complain = self.ranks.watchdog, self.ranks.watchdog.end

        def end(error: BaseException) -> None:
            self.close(error)
            complain(error)

        watchdog.end = end
        training, config, tokens = self.recipe.training, self.config, self.recipe.tokens_per_step(self.ranks.world.size)
        counts = {name: count_flops(config, training.seq_len, name) for name in NUMERATORS}
        data = self.data.describe()
        self.journal.record.update(
            environment={
                "device": self.recipe.run.device,
                "device_facts": self.backend.describe(),
                "software": software(),
                "variables": [asdict(variable) for variable in self.environment],
            },
            work={
                "parameters": config.num_parameters,
                "embedding_parameters": config.num_embedding_parameters,
                "tied": config.tied,
                "flops_per_token": {name: count.flops_per_token for name, count in counts.items()},
                "flops_unknown_because": counts["torchtitan"].reason,
                "dtype": training.dtype,
                "seq_len": training.seq_len,
                "local_batch_size": training.local_batch_size,
                "accumulation_steps": self.recipe.accumulation_steps(self.ranks.world.size),
                "tokens_per_step": tokens,
                "world_size": self.ranks.world.size,
                "layout": self.ranks.layout(self.recipe),
                "initialisation": self.recipe.model.initial_weights or f"normal(0, {config.init_std})",
                "optimizer_implementation": self.optimizer_implementation,
                "data": data,
            },
            checkpoints=self.checkpointer.section(),
        )
        flops = counts["torchtitan"].flops_per_token
        self.journal.console.facts(
            f"{self.recipe.name}: {self.recipe.description}",
            (
                ("model", f"{self.recipe.model.family} {self.recipe.model.flavor}, {config.num_parameters:,} parameters"),
                ("work", f"{tokens:,} tokens a step, seq_len {training.seq_len}, {training.dtype}, {training.steps} steps"),
                ("FLOPs", "n/a" if flops is None else f"{flops / 1e9:.4g} GFLOP a token (torchtitan numerator)"),
                (
                    "device",
                    f"{self.recipe.run.device}, {self.recipe.run.mode}, AdamW {self.optimizer_implementation}, "
                    f"pinned memory {'on' if self.backend.pin_memory else 'off'}",
                ),
                ("layout", self._layout_text()),
                ("data", f"{data['source']} ({data['fingerprint']})"),
                ("cache", self._cache_text()),
                ("run", str(self.journal.record.folder)),
            ),
        )
        for variable in self.environment:
            self.journal.console.note(f"  {variable.name}={variable.value} (set by {variable.set_by}: {variable.reason})")
        return self

    def after_first_step(self) -> None:
        """Say where the wait went, and do now what would have made it longer."""
        self.journal.console.first_step(self.timeline)
        self.watch.require_compiled()
        self._gather_ranks()
        self.peaks = self.backend.peaks(self.recipe.training.dtype, self.recipe.run.chip)
        self.journal.peak_flops = self.peaks[0].flops if self.peaks else None
        self.journal.open_trackers()
        self.journal.record.write_environment()
        compiled = self._compile()
        self.journal.record.update(timing=self._timing(), compile=compiled)
        self._account_for_cache(compiled["cache"])

    def _account_for_cache(self, cache: dict[str, Any]) -> None:
        """Say what was wrong with the compile cache, and end the run if the recipe relies on it in vain."""
        if cache["repaired"]:
            self.journal.console.note(f"compile cache: {cache['repaired']} damaged entries removed, to be compiled again")
        before, after = cache["before"]["files"], cache["after"]["files"]
        if cache["misses"] and None not in (before, after) and after <= before:
            self.journal.console.note(
                f"warning: {cache['misses']} graphs were compiled and nothing was kept in {cache['after']['directory']}; the "
                "next run compiles them again"
            )
        if self.recipe.compile.require_cached:
            uses = [(step.cache.hits, step.cache.misses) for step in self.first_steps]
            require_cached(uses, cache["after"]["directory"], graph_facts(self.recipe, self.backend))

    def _gather_ranks(self) -> None:
        """Learn from every rank how its first step went, and say so where they differ."""
        graphs = self.backend.compiled_graphs()
        own = RankFirstStep(
            rank=self.ranks.world.rank,
            host=socket.gethostname(),
            first_step_seconds=self.timeline.first_step_seconds,
            time_to_first_step_seconds=self.timeline.time_to_first_step_seconds,
            compile_seconds=self.watch.compile_seconds(),
            phases={name: phase.seconds for name, phase in self.timeline.phases.items()},
            cache=self.watch.cache_use(),
            compiled_graphs=None if graphs is None else graphs[self._graphs_before :],
        )
        self.first_steps = self.ranks.gather(own)
        note = self.journal.console.note
        if len(self.first_steps) > 1:
            slowest = self._slowest()
            compiling = "" if not slowest.compile_seconds else f", compiling {slowest.compile_seconds:.2f} s of it"
            note(f"slowest rank: {slowest.rank} on {slowest.host}, first step {slowest.first_step_seconds:.2f} s{compiling}")
        if dependent := self._rank_dependent_graphs():
            note(
                f"warning: {len(dependent)} compiled graphs are rank-dependent, so that each rank "
                "compiles its own: look for rank numbers or shapes that differ by rank in what is compiled"
            )

    def _slowest(self) -> RankFirstStep:
        """The rank that the others waited for: it compiled longest, or without compilation took longest."""
        return max(self.first_steps, key=lambda step: (step.compile_seconds or 0.0, step.first_step_seconds))

    def _rank_dependent_graphs(self) -> list[str] | None:
        """Graphs that some ranks compiled and others did not. None: the device does not name its graphs."""
        graphs = [set(step.compiled_graphs) for step in self.first_steps if step.compiled_graphs is not None]
        if not graphs or len(graphs) < len(self.first_steps):
            return None
        return sorted(set.union(*graphs) - set.intersection(*graphs))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the record; an exception goes on to the caller."""
        # Where another rank is to blame, the record says so, and not what the broken collective said.
        cause = error if error is None else self.ranks.watchdog.explain(error)
        if error is None:
            self.stragglers = stragglers(self.ranks.gather(self.timeline.later_seconds), self.timeline.later_steps)
            for straggler in filter(lambda found: found.is_noteworthy, self.stragglers):
                self.journal.console.note(f"straggler in {straggler}")
        with undisturbed():  # a launcher asks the survivors of a failure to stop: after the record is closed
            self.close(cause)

    def close(self, error: BaseException | None) -> None:
        """Write the rest and close the record. The watchdog calls this where the main thread cannot."""
        status = "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        cause = None if error is None else cause_in_one_line(error)
        if error is None and self.stopped is not None:
            status, cause = "interrupted", self.stopped.cause
        hours, price = self.timeline.elapsed() / 3600, self.recipe.run.price_per_hour
        self.journal.close()
        self.journal.record.update(
            timing=self._timing(),
            compile=self._compile(),
            checkpoints=self.checkpointer.section(),
            fallbacks=self.backend.fallback_ops(),
            memory=asdict(self.backend.memory()),
            quality=self.journal.quality() | {"epoch": self.data.epoch},
            cost={
                "hours": hours,
                "price_per_hour": price,
                "price_source": self.recipe.run.price_source,
                "cost": None if price is None else price * hours,
            },
        )
        if error is None:
            peak = self.backend.memory().peak_allocated_bytes
            self.journal.console.facts("summary", summary(self.journal.record.content, peak))
        self.journal.finish(status, cause)
        self.journal.console.note(f"{status}: {self.journal.record.folder / 'record.json'}")

    def _timing(self) -> dict[str, Any]:
        finished_first = not self.timeline.open
        speed = self.journal.speed()
        rate = speed["steady"]["tokens_per_second"] if speed["steady"] else None
        return {
            "first_step_seconds": self.timeline.first_step_seconds if finished_first else None,
            "time_to_first_step_seconds": self.timeline.time_to_first_step_seconds if finished_first else None,
            "phases": [
                {"phase": name, "in_first_step": name in phases.FIRST_STEP, "seconds": phase.seconds, **asdict(phase.compile)}
                for name, phase in self.timeline.phases.items()
            ],
            "slowest_rank": self._slowest().rank if self.first_steps else None,
            "stragglers": [asdict(straggler) for straggler in self.stragglers],
            "ranks": [
                {key: value for key, value in asdict(step).items() if key not in ("cache", "compiled_graphs")}
                | {"cache_hits": step.cache.hits, "cache_misses": step.cache.misses}
                for step in self.first_steps
            ],
            "deterministic": self.recipe.run.deterministic,
            **speed,
            "mfu": self._mfu(rate),
        }

    def _mfu(self, tokens_per_second: float | None) -> list[dict[str, Any]]:
        """Every numerator under every known peak; empty without a peak, because there is no MFU then."""
        result = []
        for numerator in NUMERATORS:
            flops = count_flops(self.config, self.recipe.training.seq_len, numerator).flops_per_token
            for peak in self.peaks:
                share = mfu(flops, tokens_per_second, self.ranks.world.size, peak.flops)
                result.append({"mfu": share, "numerator": numerator, "devices": self.ranks.world.size, "peak": asdict(peak)})
        return result

    def _compile(self) -> dict[str, Any]:
        asked = self.recipe.run.mode == "compile"
        return {
            "mode": self.recipe.run.mode,
            "region": self.recipe.compile.region if asked else None,
            "backend": (self.recipe.compile.backend or self.backend.compile_backend) if asked else None,
            "rank_dependent_graphs": self._rank_dependent_graphs(),
            **self.watch.report([step.cache for step in self.first_steps]),
        }

    def _cache_text(self) -> str:
        before = self.watch.cache_before
        if self.recipe.run.mode == "eager" and not self.backend.compiles_eagerly:
            return "none in eager mode"
        files = "n/a" if before.files is None else f"{before.files:,}"
        return f"{before.directory or 'n/a'}, {files} entries"

    def _layout_text(self) -> str:
        layout, ranks = self.ranks.layout(self.recipe), self.ranks.world.size
        if ranks == 1:
            return f"one rank, activation checkpointing {layout['activation_checkpointing']}"
        return (
            f"{ranks} ranks = {self.ranks.replicas} replicas x {self.ranks.shards} shards x {self.ranks.tensor} tensor "
            f"parallel, {layout['data_parallel_wrapper'] or 'no data parallel'}, "
            f"activation checkpointing {layout['activation_checkpointing']}"
        )
