"""When a run stops before its last step: a signal, a budget of time, a file. All ranks then stop after the same step.

The first signal lets the step be finished and saved. A second one ends the process at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from recipes.base import Run
from training.wakeup import STOPS, StopRequests

if TYPE_CHECKING:
    from training.distributed import Ranks, Vote

OUT_OF_TIME = 75
"""Exit code of a run that its budget ended: EX_TEMPFAIL of sysexits.h, come again."""


@dataclass(frozen=True)
class Reason:
    """Why a run stopped before its end."""

    cause: str
    exit_code: int


REASONS = {
    1: Reason("run.budget_minutes is over", OUT_OF_TIME),
    2: Reason("run.stop_file is there", 128 + signal.SIGTERM),
    3: Reason("SIGINT", 128 + signal.SIGINT),
    4: Reason("SIGTERM", 128 + signal.SIGTERM),
}
"""By the number that ranks tell each other; the highest wins."""


class Stopping:
    """Asked after every step whether it was the last. As a context manager it gives the signals back at the end.

    Until the first step is over a signal ends the process: there is nothing yet that could be saved. With several ranks each
    says what it wishes after a step, and learns what all wished after the next one: nobody waits, and all stop together.

    Args:
        elapsed: seconds since the process was created.
        longest_save: seconds of the slowest save so far. None: there was none.
    """

    def __init__(self, run: Run, ranks: Ranks, elapsed: Callable[[], float], longest_save: Callable[[], float | None]):
        self.run, self.ranks, self.elapsed, self.longest_save = run, ranks, elapsed, longest_save
        self._signal: int | None = None
        self._requests = StopRequests(patient=True)
        self._ended_at = self._longest_step = 0.0
        self._vote: Vote | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        return self

    def arm(self) -> None:
        """Let the next signal be answered after the step that it comes in."""
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._on_signal)
        self.ranks.watchdog.stops.patient = True
        self._ended_at = self.elapsed()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._vote is not None:
            self._vote.result()  # none may be open when the ranks talk of something else
        self.ranks.watchdog.stops.patient = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        self._requests.hear(time.monotonic())
        if self._requests.end_at is not None:
            raise KeyboardInterrupt

    def after_step(self, step: int) -> Reason | None:
        """Return why this step was the last one. None: it was not."""
        now = self.elapsed()
        if self._ended_at:
            self._longest_step = max(self._longest_step, now - self._ended_at)
            self._ended_at = now
        wish, told = self._wish(now), 0
        if self.ranks.world.size == 1:
            told = wish
        else:
            if self._vote is not None:
                told = self._vote.result()
            self._vote = None if told else self.ranks.vote(wish)
        reason = REASONS.get(told)
        return reason and replace(reason, cause=f"{reason.cause}: stopped after step {step}; --resume goes on from there")

    def _wish(self, now: float) -> int:
        """What this rank wants after this step, as a number of REASONS. 0: to go on."""
        if self._signal is not None:
            return 4 if self._signal == signal.SIGTERM else 3
        if self.run.stop_file is not None and os.path.exists(self.run.stop_file):
            return 2
        if self.run.budget_minutes is not None and now + self._reserve() >= 60 * self.run.budget_minutes:
            return 1
        return 0

    def _reserve(self) -> float:
        """Seconds to keep for the end: two steps and twice the longest save, or a tenth of the budget if none was seen."""
        assert self.run.budget_minutes is not None
        save = self.longest_save()
        return 2 * self._longest_step + (6 * self.run.budget_minutes if save is None else 2 * save + 1)
