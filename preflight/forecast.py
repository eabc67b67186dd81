"""How long the first step will take, from what this machine's own runs took, and after how many steps compiling has paid.

Each past run of the same device, mode and compiler gives a forecast of its own: its seconds for an operator, in each direction,
times the operators of the recipe's graphs, and its execution of the first step by FLOPs. The forecast is their
median, and its interval reaches from the lowest to the highest of them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from preflight.choices import WORK
from preflight.graphs import Graph

COLD, WARM = "cold", "warm"
_NEAR = 8.0
"""How many times the FLOPs of another run's step a step may have for its forecast to rest on such runs alone."""


@dataclass(frozen=True)
class PastRun:
    """What one record says of a first step."""

    id: str
    mode: str
    cache_state: str | None
    first_step_seconds: float
    compile_seconds: dict[str, float]
    """By direction."""
    execution_seconds: float
    """The first step without its compilations."""
    flops: float | None
    """Of the model, in one step."""
    steady_seconds: float | None
    work: tuple[Any, ...]
    """What two runs must have in common to be compared in speed."""
    operators: dict[str, int] = field(default_factory=dict)
    """Of its distinct graphs, by direction. Empty: not known, or none."""

    def with_graphs(self, graphs: Iterable[Graph]) -> PastRun:
        """Return the run with the size of its graphs."""
        return replace(self, operators=_sizes(graphs))


@dataclass(frozen=True)
class Seconds:
    """A forecast. None: there is nothing to base it on."""

    seconds: float | None
    low: float | None
    high: float | None
    runs: int
    """Past runs that it rests on."""


@dataclass(frozen=True)
class BreakEven:
    """From which step on the compiled run is ahead, counted from the start of the first step."""

    step: int | None
    """None: never."""
    eager_seconds: float
    """Of all planned steps."""
    compiled_seconds: float
    source: str


def read_runs(folder: Path, device: str, host: str, versions: Mapping[str, str | None]) -> list[PastRun]:
    """Read the runs of this machine that got past their first step, oldest first.

    Args:
        folder: holds one folder for each run.
        versions: of packages. Runs with another one are left out: their compiler was another.
    """
    runs = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            software, where = record["environment"]["software"], record["environment"]["device"]
            same = all(software["packages"].get(name) == version for name, version in versions.items())
            if where == device and software["host"] == host and same and not record["timing"].get("deterministic"):
                runs.append(_past_run(record))
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            continue  # a run that ended before its first step did, or not a record
    return runs


def _past_run(record: Mapping[str, Any]) -> PastRun:
    compile_, timing, work = record["compile"], record["timing"], record["work"]
    compilations = compile_.get("compilations") or []
    seconds = Counter[str]()
    for compilation in compilations:
        seconds[compilation["direction"]] += compilation["seconds"]
    flops = work["flops_per_token"].get("torchtitan")
    steady = timing.get("steady") or {}
    return PastRun(
        id=record["id"],
        mode=compile_["mode"],
        cache_state=compile_["cache"]["state"] if compilations else None,
        first_step_seconds=timing["first_step_seconds"],
        compile_seconds=dict(seconds),
        execution_seconds=max(0.0, timing["first_step_seconds"] - sum(seconds.values())),
        flops=None if flops is None else flops * work["tokens_per_step"] / work["world_size"],
        steady_seconds=steady.get("seconds_per_step_median"),
        work=work_of(record["identity"]["recipe"], work["world_size"]),
    )


def work_of(recipe: Mapping[str, Any], world_size: int) -> tuple[Any, ...]:
    """Return what two runs must share for their speeds to be compared: all but how they compute it."""
    training = recipe["training"]
    model = tuple((name, value) for name, value in sorted(recipe["model"].items()) if name != "initial_weights")
    shape = tuple(training[name] for name in WORK)
    return (model, shape, world_size)


def first_step(
    graphs: Sequence[Graph], flops: float | None, runs: Sequence[PastRun], mode: str, state: str, known: Iterable[str] = ()
) -> Seconds:
    """Forecast the first step.

    Args:
        graphs: those that will be compiled, in order; each distinct one costs once.
        flops: of the model, one rank's share of a step.
        state: cold or warm: how a graph that is not `known` is met by the cache.
        known: fingerprints of graphs that the cache has; they cost what they cost in warm runs.
    """
    known = set(known)
    alike = [run for run in runs if run.mode == mode and set(run.operators) == set(run.compile_seconds)]
    alike = _similar(alike, flops)
    by_state = {each: [run for run in alike if run.cache_state in (each, None)] for each in (COLD, WARM)}
    parts = {WARM: _sizes(graph for graph in graphs if state == WARM or graph.fingerprint in known)}
    parts[COLD] = _sizes(graph for graph in graphs if state != WARM and graph.fingerprint not in known)
    asked = [each for each in parts if parts[each]] or [state]
    if any(not by_state[each] for each in asked):
        return Seconds(None, None, None, 0)
    forecasts = []
    longest = max(len(by_state[each]) for each in asked)
    for index in range(longest):
        chosen = {each: by_state[each][index % len(by_state[each])] for each in asked}
        total = _execution(chosen[asked[0]], flops)
        for each, run in chosen.items():
            for direction, operators in parts[each].items():
                if direction not in run.operators:
                    return Seconds(None, None, None, 0)
                total += run.compile_seconds[direction] * operators / run.operators[direction]
        forecasts.append(total)
    return Seconds(statistics.median(forecasts), min(forecasts), max(forecasts), longest)


def _sizes(graphs: Iterable[Graph]) -> dict[str, int]:
    """Return the operators of the distinct ones among these graphs, by direction."""
    sizes = Counter[str]()
    for graph in {graph.fingerprint: graph for graph in graphs}.values():
        sizes[graph.direction] += graph.operators
    return dict(sizes)


def _similar(runs: list[PastRun], flops: float | None) -> list[PastRun]:
    """Return the runs whose step does about as much, if there are any: a tiny step is all overhead, which does not scale."""
    if not flops:
        return runs
    near = [run for run in runs if run.flops and 1 / _NEAR <= flops / run.flops <= _NEAR]
    return near or runs


def _execution(run: PastRun, flops: float | None) -> float:
    if not flops or not run.flops:
        return run.execution_seconds
    return run.execution_seconds * flops / run.flops


def break_even(first: Mapping[str, float], steady: Mapping[str, float], steps: int, source: str) -> BreakEven:
    """Compare the two modes: total(N) = first step + (N - 1) x steady step.

    Args:
        first: seconds of the first step, by mode.
        steady: seconds of a later one.
        steps: planned.
    """
    totals = {mode: first[mode] + (steps - 1) * steady[mode] for mode in ("eager", "compile")}
    gained, lost = steady["eager"] - steady["compile"], first["compile"] - first["eager"]
    step: int | None
    if lost < 0:
        step = 1
    elif gained <= 0:
        step = None
    else:
        step = math.floor(lost / gained) + 2  # the first whole number of steps at which compiled is strictly ahead
    return BreakEven(step, totals["eager"], totals["compile"], source)


def advice(found: BreakEven, steps: int) -> str:
    """Return which mode to use, in one sentence."""
    if found.step is None:
        return f"{steps} steps planned: eager, compiling never pays ({found.source})"
    if steps < found.step:
        saved = found.compiled_seconds - found.eager_seconds
        return f"{steps} steps planned: eager is ahead until step {found.step}, by {saved:.0f} s at the end ({found.source})"
    saved = found.eager_seconds - found.compiled_seconds
    return f"{steps} steps planned: compile is ahead from step {found.step}, by {saved:.0f} s at the end ({found.source})"
