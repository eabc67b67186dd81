"""Two runs side by side, once they are known to have done the same work. Different work is shown and not divided."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ledger.runs import Run, chip, usual_mfu

Look = Callable[[Run], Any]


def _at(path: str) -> Look:
    return lambda run: run.get(path)


def _versions(run: Run) -> Any:
    packages = run.get("environment.software.packages")
    return {name: packages[name] for name in sorted(packages) if packages[name]} if isinstance(packages, dict) else None


MUST_BE_EQUAL: dict[str, Look] = {
    "model": lambda run: [run.get("identity.recipe.model.family"), run.get("work.parameters"), run.get("work.tied")],
    "FLOPs a token": _at("work.flops_per_token"),
    "dtype": _at("work.dtype"),
    "seq_len": _at("work.seq_len"),
    "tokens per step": _at("work.tokens_per_step"),
    "layout": _at("work.layout"),
    "ranks": _at("work.world_size"),
    "accumulation": _at("work.accumulation_steps"),
    "data": _at("work.data.fingerprint"),
    "tokenizer": _at("work.data.tokenizer.fingerprint"),
    "device": _at("environment.device"),
    "chip": chip,
    "logical cores": _at("environment.device_facts.logical_core_config"),
    "versions": _versions,
    "deterministic": _at("timing.deterministic"),
}
"""What makes a ratio mean something."""
MAY_DIFFER: dict[str, Look] = {
    "mode": _at("identity.recipe.run.mode"),
    "cache": _at("compile.cache.state"),
    "code": _at("identity.git_commit"),
    "host": _at("environment.software.host"),
    "seed": _at("identity.recipe.run.seed"),
}
"""What is compared, most of the time, and always shown."""
FIGURES: dict[str, tuple[Look, str]] = {
    # figure: where it is, and its unit
    "first step": (lambda run: run.number("timing.first_step_seconds"), "s"),
    "until the first step": (lambda run: run.number("timing.time_to_first_step_seconds"), "s"),
    "a steady step": (lambda run: run.number("timing.steady.seconds_per_step_median"), "s"),
    "steady tokens/s": (lambda run: run.number("timing.steady.tokens_per_second"), ""),
    "MFU": (usual_mfu, ""),
    "whole run": (lambda run: None if (hours := run.number("cost.hours")) is None else 3600 * hours, "s"),
    "peak memory": (lambda run: run.number("memory.peak_allocated_bytes"), "bytes"),
    "compiling": (lambda run: run.number("compile.compile_seconds"), "s"),
    "late compiles": (lambda run: _count(run.get("compile.late_compiles")), ""),
    "operators on the host": (lambda run: _count(run.get("fallbacks")), ""),
    "last loss": (lambda run: run.number("quality.loss_last_window"), ""),
    "cost": (lambda run: run.number("cost.cost"), "USD"),
}


@dataclass(frozen=True)
class Row:
    """One line: what each run has."""

    name: str
    values: list[Any]
    unit: str = ""

    @property
    def differs(self) -> bool:
        return any(value != self.values[0] for value in self.values)

    @property
    def ratio(self) -> float | None:
        """The second over the first. None: one is unknown, zero, or there are more than two."""
        if len(self.values) != 2 or not all(isinstance(value, (int, float)) and value for value in self.values):
            return None
        return self.values[1] / self.values[0]


@dataclass(frozen=True)
class Interval:
    """The ratio of two medians of seconds per step, b over a, with 95 % of its bootstrap."""

    ratio: float
    low: float
    high: float
    windows: tuple[int, int]


@dataclass(frozen=True)
class LossGap:
    """Where two loss curves are furthest apart."""

    step: int
    gap: float
    """b minus a, nats."""
    steps: int
    """Steps that both have."""


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    runs: list[Run]
    unequal: list[Row]
    """What differs though it must not."""
    settings: list[Row]
    figures: list[Row]
    phases: list[Row]
    """Seconds of the first step and of what came before it."""
    interval: Interval | None
    """None: not two runs, or too few windows."""
    loss_gap: LossGap | None

    @property
    def comparable(self) -> bool:
        return not self.unequal


def compare(runs: list[Run]) -> Comparison:
    """Put runs side by side."""
    rows = [Row(name, [look(run) for run in runs]) for name, look in MUST_BE_EQUAL.items()]
    unequal = [row for row in rows if row.differs]
    unequal += [Row("record", [run.problem or run.state for run in runs])] if any(not run.record for run in runs) else []
    two = len(runs) == 2
    return Comparison(
        runs=runs,
        unequal=unequal,
        settings=[Row(name, [look(run) for run in runs]) for name, look in MAY_DIFFER.items()],
        figures=[Row(name, [look(run) for run in runs], unit) for name, (look, unit) in FIGURES.items()],
        phases=list(_phases(runs)),
        interval=_interval(runs[0], runs[1]) if two else None,
        loss_gap=_loss_gap(runs[0], runs[1]) if two else None,
    )


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict)) else None


def _phases(runs: list[Run]) -> Iterator[Row]:
    found = [
        {
            entry["phase"]: entry["seconds"]
            for entry in run.get("timing.phases") or ()
            if isinstance(entry, dict) and "phase" in entry
        }
        for run in runs
    ]
    for name in dict.fromkeys(name for phases in found for name in phases):
        yield Row(name.replace("_", " "), [phases.get(name) for phases in found], "s")


def steady_windows(run: Run) -> list[float]:
    """Return seconds per step of each undisturbed window after the first step."""
    windows = [window for window in run.get("timing.windows") or () if isinstance(window, dict)]
    return [
        window["seconds"] / (window["last_step"] - window["first_step"] + 1)
        for window in windows[1:]
        if window.get("disturbed_by") is None
    ]


def _interval(a: Run, b: Run, draws: int = 2000) -> Interval | None:
    """Bootstrap over windows; with the same runs it always gives the same interval."""
    ours, theirs = steady_windows(a), steady_windows(b)
    if min(len(ours), len(theirs)) < 3:
        return None
    chance = random.Random(0)
    ratios = sorted(
        statistics.median(chance.choices(theirs, k=len(theirs))) / statistics.median(chance.choices(ours, k=len(ours)))
        for _ in range(draws)
    )
    ratio = statistics.median(theirs) / statistics.median(ours)
    return Interval(ratio, ratios[int(0.025 * draws)], ratios[int(0.975 * draws)], (len(ours), len(theirs)))


def _loss_gap(a: Run, b: Run) -> LossGap | None:
    """Return the largest gap between the losses of steps that both have. None: there is no such step."""
    ours, theirs = _losses(a), _losses(b)
    gaps = {step: theirs[step] - loss for step, loss in ours.items() if step in theirs}
    if not gaps:
        return None
    step = max(gaps, key=lambda step: abs(gaps[step]))
    return LossGap(step, gaps[step], len(gaps))


def _losses(run: Run) -> dict[int, float]:
    """Return the finite losses of a run by step."""
    found = ((step.get("step"), step.get("loss")) for step in run.steps())
    return {step: loss for step, loss in found if isinstance(step, int) and isinstance(loss, float) and math.isfinite(loss)}
