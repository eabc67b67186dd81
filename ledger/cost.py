"""What results have cost: every attempt counts, also those that failed, were killed or have been removed since."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ledger.compare import MUST_BE_EQUAL
from ledger.runs import Run

NO_GRAPHS = ("data", "tokenizer")
"""What two runs that compile the same may differ in."""


@dataclass(frozen=True)
class Attempt:
    """What one run cost and brought. None: unknown."""

    id: str
    recipe: str | None
    state: str
    hours: float | None
    hours_at_least: bool
    """The run never closed its record: these are the hours until the last line that it wrote."""
    price_per_hour: float | None
    tokens_per_step: int | None
    tokens_per_second: float | None
    """Steady."""
    last_step: int | None
    """The last one that it recorded, counted from the beginning of the training that it went on with."""
    resumed_from: str | None
    """Id of the run whose checkpoint it went on from."""
    resumed_step: int
    """Zero: it began at the beginning."""
    compile_seconds: float | None
    cache_state: str | None
    graphs: str | None
    """Equal for runs that compile the same, as far as their records tell."""

    @classmethod
    def of(cls, run: Run) -> Attempt:
        """Take it out of a record."""
        last, hours = run.last_step(), run.number("cost.hours")
        open_ended = hours is None
        if hours is None:
            hours = _hours_until_the_last_line(run, last)
        tokens, resumed = run.number("work.tokens_per_step"), run.number("checkpoints.resumed_from.step")
        number = last.get("step")
        return cls(
            id=run.id,
            recipe=run.text("identity.recipe.name"),
            state=run.state,
            hours=hours,
            hours_at_least=open_ended and hours is not None,
            price_per_hour=run.number("cost.price_per_hour") or run.number("identity.recipe.run.price_per_hour"),
            tokens_per_step=None if tokens is None else int(tokens),
            tokens_per_second=run.number("timing.steady.tokens_per_second"),
            last_step=number if isinstance(number, int) else None,
            resumed_from=run.text("checkpoints.resumed_from.run"),
            resumed_step=int(resumed or 0),
            compile_seconds=run.number("compile.compile_seconds"),
            cache_state=run.text("compile.cache.state"),
            graphs=_graphs(run),
        )

    @property
    def cost(self) -> float | None:
        """US dollars. None: hours or price are unknown."""
        return None if self.hours is None or self.price_per_hour is None else self.hours * self.price_per_hour


@dataclass(frozen=True)
class Saved:
    """Compile seconds that the cache spared a run."""

    id: str
    seconds: float
    against: str
    """The cold run of the same work that it is held against."""


@dataclass(frozen=True)
class FirstResult:
    """What it took until a recipe had its first finished run."""

    id: str
    attempts: int
    """This one included."""
    hours: float
    cost: float | None
    """None: an attempt has no price."""


@dataclass(frozen=True)
class Bill:
    """All attempts of one recipe."""

    recipe: str
    attempts: list[Attempt]
    """Oldest first."""
    states: dict[str, int]
    hours: float
    hours_at_least: bool
    """Some attempts were killed, or left no time at all."""
    cost: float | None
    """Of all attempts. None: one of them has no price."""
    result_tokens: int
    """Tokens that finished runs have trained on; what was trained twice counts once."""
    cost_per_million_tokens: float | None
    """All attempts over the tokens of the results. None: there are none, or no price."""
    steady_cost_per_million_tokens: float | None
    """At the steady speed of the last result alone."""
    first_result: FirstResult | None
    compile_seconds: float
    compile_unknown: int
    """Attempts that do not tell their compile seconds."""
    saved: list[Saved]

    @property
    def saved_seconds(self) -> float:
        return sum(each.seconds for each in self.saved)


def bills(attempts: Sequence[Attempt], price_per_hour: float | None = None) -> list[Bill]:
    """Add up the attempts of each recipe.

    Args:
        price_per_hour: US dollars for all machines of a run together. None: as each record says.
    """
    if price_per_hour is not None:
        attempts = [replace(attempt, price_per_hour=price_per_hour) for attempt in attempts]
    by_recipe: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_recipe.setdefault(attempt.recipe or "unknown", []).append(attempt)
    return [_bill(recipe, by_recipe[recipe]) for recipe in sorted(by_recipe)]


def _bill(recipe: str, attempts: list[Attempt]) -> Bill:
    results = [attempt for attempt in attempts if attempt.state == "finished"]
    ids = {result.id for result in results}
    tokens = sum(
        (result.last_step - (result.resumed_step if result.resumed_from in ids else 0)) * result.tokens_per_step
        for result in results
        if result.last_step is not None and result.tokens_per_step is not None
    )
    cost = _cost(attempts)
    first = None
    if results:
        until = attempts[: attempts.index(results[0]) + 1]
        first = FirstResult(results[0].id, len(until), _hours(until), _cost(until))
    return Bill(
        recipe=recipe,
        attempts=attempts,
        states=dict(Counter(attempt.state for attempt in attempts)),
        hours=_hours(attempts),
        hours_at_least=any(attempt.hours is None or attempt.hours_at_least for attempt in attempts),
        cost=cost,
        result_tokens=tokens,
        cost_per_million_tokens=None if cost is None or not tokens else cost / tokens * 1e6,
        steady_cost_per_million_tokens=_steady_cost(results[-1]) if results else None,
        first_result=first,
        compile_seconds=sum(attempt.compile_seconds or 0.0 for attempt in attempts),
        compile_unknown=sum(attempt.compile_seconds is None for attempt in attempts),
        saved=_saved(attempts),
    )


def _hours(attempts: Iterable[Attempt]) -> float:
    return sum(attempt.hours or 0.0 for attempt in attempts)


def _cost(attempts: Iterable[Attempt]) -> float | None:
    """None: one that has taken time has no price. One that left no time adds nothing that could be known."""
    timed = [attempt for attempt in attempts if attempt.hours is not None]
    costs = [attempt.cost for attempt in timed if attempt.cost is not None]
    return sum(costs) if timed and len(costs) == len(timed) else None


def _steady_cost(attempt: Attempt) -> float | None:
    if attempt.price_per_hour is None or not attempt.tokens_per_second:
        return None
    return attempt.price_per_hour / 3600 / attempt.tokens_per_second * 1e6


def _saved(attempts: Iterable[Attempt]) -> list[Saved]:
    """Hold each run that found something in its cache against the last cold run of the same work before it."""
    cold: dict[str, tuple[str, float]] = {}
    saved = []
    for attempt in attempts:
        if attempt.graphs is None or attempt.compile_seconds is None:
            continue
        if attempt.cache_state == "cold":
            cold[attempt.graphs] = attempt.id, attempt.compile_seconds
        elif attempt.cache_state in ("warm", "partial") and attempt.graphs in cold:
            against, seconds = cold[attempt.graphs]
            saved.append(Saved(attempt.id, seconds - attempt.compile_seconds, against))
    return saved


def _graphs(run: Run) -> str | None:
    if run.get("work") is None:
        return None
    facts = {name: look(run) for name, look in MUST_BE_EQUAL.items() if name not in NO_GRAPHS}
    facts |= {"mode": run.get("compile.mode"), "region": run.get("compile.region")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _hours_until_the_last_line(run: Run, last: dict[str, Any]) -> float | None:
    """Return how long a run that never closed its record lived at the least. None: it left no time behind."""
    until_first = run.number("timing.time_to_first_step_seconds")
    try:
        began, ended = (datetime.fromisoformat(str(when)) for when in (run.get("started_utc"), last.get("written_utc")))
        seconds = max((ended - began).total_seconds(), until_first or 0.0)
    except (ValueError, TypeError):
        seconds = until_first
    return None if seconds is None else seconds / 3600
