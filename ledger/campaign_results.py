"""What a campaign found: wait and pace of each scenario and mode, which mode wins how long a run, and what that costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ledger.break_even import Answer, Pace, break_even, of_run
from ledger.campaign import EDIT, SCENARIOS, Campaign
from ledger.cost import Attempt
from ledger.runs import Run


@dataclass(frozen=True)
class Spread:
    """A figure over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None: one of them is unknown, or there are none."""
        found = list(values)
        known = [value for value in found if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class Result:
    """One scenario in one mode. None: unknown."""

    scenario: str
    mode: str
    runs: list[str]
    until_first_step: Spread | None
    """Seconds from the creation of the process to the end of the first step."""
    first_step: Spread | None
    """Seconds."""
    tokens_per_second: Spread | None
    compiled: Spread | None
    """Graphs or operators that were compiled because the cache did not hold them, on one rank."""
    late_compiles: Spread | None
    pace: Pace


@dataclass(frozen=True)
class Winner:
    """Which mode has taken less time in a scenario, for one number of steps."""

    scenario: str
    steps: int
    seconds: dict[str, float]
    """Mode: seconds in all, from the loop asking for its first batch."""
    cost: dict[str, float | None]
    mode: str


@dataclass(frozen=True)
class Results:
    """The whole table."""

    edit: str
    results: list[Result]
    winners: list[Winner]
    crossings: dict[str, Answer]
    """Scenario: eager against compile."""
    abandoned_hours: float
    """Of runs that count for nothing."""
    hours: float
    """Of all runs, those included."""


def results(campaign: Campaign, steps: Sequence[int], price_per_hour: float | None = None) -> Results:
    """Gather what is done so far.

    Raises:
        LedgerError: if a run has no steady step.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    for cell, run in campaign:
        runs.setdefault((cell.scenario, cell.mode), []).append(run)
    found = [_result(scenario, mode, each, price_per_hour) for (scenario, mode), each in runs.items()]
    found.sort(key=lambda result: (SCENARIOS.index(result.scenario), campaign.plan.modes.index(result.mode)))
    winners, crossings = [], {}
    for scenario in SCENARIOS:
        paces = {result.mode: result.pace for result in found if result.scenario == scenario}
        if len(paces) != 2:
            continue
        crossings[scenario] = break_even(*paces.values())
        for count in steps:
            seconds = {mode: pace.total(count) for mode, pace in paces.items()}
            cost = {mode: pace.cost(seconds[mode]) for mode, pace in paces.items()}
            winners.append(Winner(scenario, count, seconds, cost, min(seconds, key=lambda mode: seconds[mode])))
    abandoned, counted = _hours(campaign.abandoned()), _hours(run for each in runs.values() for run in each)
    return Results(campaign.plan.edit_name, found, winners, crossings, abandoned, abandoned + counted)


def _hours(runs: Iterable[Run]) -> float:
    """Of a run that was killed: until the last line that it wrote."""
    return sum(Attempt.of(run).hours or 0.0 for run in runs)


def _result(scenario: str, mode: str, runs: Sequence[Run], price_per_hour: float | None) -> Result:
    paces = [of_run(run, price_per_hour) for run in runs]
    first, step = Spread.of(pace.first_seconds for pace in paces), Spread.of(pace.step_seconds for pace in paces)
    assert first is not None and step is not None  # a pace has both
    late = (run.get("compile.late_compiles") for run in runs)
    return Result(
        scenario=scenario,
        mode=mode,
        runs=[run.id for run in runs],
        until_first_step=Spread.of(run.number("timing.time_to_first_step_seconds") for run in runs),
        first_step=first,
        tokens_per_second=Spread.of(run.number("timing.steady.tokens_per_second") for run in runs),
        compiled=Spread.of(run.number("compile.cache.misses") for run in runs),
        late_compiles=Spread.of(float(len(each)) if isinstance(each, list) else None for each in late),
        pace=Pace(
            name=mode if scenario != EDIT else f"{mode}, edited",
            first_seconds=first.median,
            step_seconds=step.median,
            step_seconds_low=step.low,
            step_seconds_high=step.high,
            tokens_per_step=paces[0].tokens_per_step,
            cache_state=scenario,
            price_per_hour=paces[0].price_per_hour,
        ),
    )
