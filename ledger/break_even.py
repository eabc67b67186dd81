"""From which step on one run has taken less time in all than another: total(N) = first + (N - 1) x seconds per step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ledger import claims
from ledger.runs import LedgerError, Run, find_run


@dataclass(frozen=True)
class Pace:
    """What a run's total time follows from."""

    name: str
    first_seconds: float
    step_seconds: float
    step_seconds_low: float
    """Fastest window. The median itself where no spread is known."""
    step_seconds_high: float
    tokens_per_step: int | None
    cache_state: str | None
    price_per_hour: float | None = None
    """US dollars. None: unknown."""

    def total(self, steps: int, step_seconds: float | None = None) -> float:
        """Seconds until the end of step `steps`, counted from the loop asking for its first batch."""
        return self.first_seconds + (steps - 1) * (self.step_seconds if step_seconds is None else step_seconds)

    def cost(self, seconds: float) -> float | None:
        """US dollars for that time. None: no price is known."""
        return None if self.price_per_hour is None else seconds / 3600 * self.price_per_hour


@dataclass(frozen=True)
class Crossing:
    """Where the later one overtakes the other."""

    ahead: str
    """Name of the one that is ahead from then on."""
    step: int
    """First step, counted from 1, after which it has spent less time in all."""
    seconds: float
    """Its total until then."""
    tokens: int | None
    cost: float | None


@dataclass(frozen=True)
class Answer:
    """Two paces against each other."""

    a: Pace
    b: Pace
    crossing: Crossing | None
    """None: the one that is ahead after the first step stays ahead."""
    earliest_step: int | None
    """The crossing's step if both paces are taken at the ends of their spread, whichever way brings it soonest."""
    latest_step: int | None
    """The same for the last. None: at one end of the spread there is no crossing."""

    def winner(self, steps: int) -> Pace:
        """The one that has spent less time after that many steps; the first one where they are equal."""
        return self.b if self.b.total(steps) < self.a.total(steps) else self.a


def of_run(run: Run, price_per_hour: float | None = None) -> Pace:
    """Return the pace of a run.

    Raises:
        LedgerError: if it has no first step or no steady step.
    """
    first, step = run.number("timing.first_step_seconds"), run.number("timing.steady.seconds_per_step_median")
    if first is None or step is None:
        lacking = "a first step" if first is None else "a steady step (an undisturbed window after the first)"
        raise LedgerError(f"{run.id} ({run.state}) has not recorded {lacking}; run it for longer")
    low, high = run.number("timing.steady.seconds_per_step_min"), run.number("timing.steady.seconds_per_step_max")
    tokens = run.number("work.tokens_per_step")
    return Pace(
        name=f"{run.id} ({run.text('identity.recipe.run.mode') or 'mode unknown'})",
        first_seconds=first,
        step_seconds=step,
        step_seconds_low=step if low is None else low,
        step_seconds_high=step if high is None else high,
        tokens_per_step=None if tokens is None else int(tokens),
        cache_state=run.text("compile.cache.state"),
        price_per_hour=price_per_hour if price_per_hour is not None else run.number("cost.price_per_hour"),
    )


def of_claim(claim: claims.Claim, mode: str, price_per_hour: float | None = None) -> Pace:
    """Return the pace that a claim's figures give.

    Raises:
        LedgerError: if it does not say enough.
    """
    first, rate = claim.figure(mode, "first_step_seconds"), claim.figure(mode, "tokens_per_second")
    tokens = claim.fact("tokens_per_step")
    if first is None or rate is None or tokens is None:
        raise LedgerError(f"claim {claim.name}, {mode}: first_step_seconds, tokens_per_second or tokens_per_step is not known")
    step = tokens / rate
    return Pace(f"{claim.name}/{mode} (published)", first, step, step, step, tokens, claim.fact("cache_state"), price_per_hour)


def find_pace(name: str, runs: Path, price_per_hour: float | None = None) -> Pace:
    """Return the pace of a run, or of a claim's row written as `claim:NAME/MODE`."""
    if not name.startswith("claim:"):
        return of_run(find_run(name, runs), price_per_hour)
    claim_name, _, mode = name.removeprefix("claim:").partition("/")
    claim = claims.load(claim_name)
    if mode not in claim.rows:
        raise LedgerError(f"{name}: got mode {mode!r}, allowed: {', '.join(f'claim:{claim_name}/{row}' for row in claim.rows)}")
    return of_claim(claim, mode, price_per_hour)


def break_even(a: Pace, b: Pace) -> Answer:
    """Hold two paces against each other.

    Raises:
        LedgerError: if their steps do different work.
    """
    if None not in (a.tokens_per_step, b.tokens_per_step) and a.tokens_per_step != b.tokens_per_step:
        raise LedgerError(
            f"not comparable: a step of {a.name} is {a.tokens_per_step:,} tokens, one of {b.name} {b.tokens_per_step:,}"
        )
    behind, ahead = (a, b) if a.first_seconds <= b.first_seconds else (b, a)
    step = _overtakes(behind.first_seconds, behind.step_seconds, ahead.first_seconds, ahead.step_seconds)
    corners = [
        _overtakes(behind.first_seconds, slow, ahead.first_seconds, fast) for slow, fast in product(_ends(behind), _ends(ahead))
    ]
    known = [corner for corner in corners if corner is not None]
    crossing = None
    if step is not None:
        seconds, tokens = ahead.total(step), ahead.tokens_per_step
        crossing = Crossing(ahead.name, step, seconds, None if tokens is None else step * tokens, ahead.cost(seconds))
    return Answer(a, b, crossing, min(known, default=None), max(known) if known and len(known) == len(corners) else None)


def _ends(pace: Pace) -> Iterator[float]:
    yield pace.step_seconds_low
    yield pace.step_seconds_high


def _overtakes(first: float, step: float, later_first: float, later_step: float) -> int | None:
    """Return the first step after which the one with the longer first step has spent less. None: never."""
    if later_step >= step:
        return None
    return math.floor((later_first - first) / (step - later_step)) + 2
