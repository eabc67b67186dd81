"""Which rank is slowest in which phase of the steps after the first. Torch-free.

Times are the host's, and the device is not waited for. Where a phase contains collectives, fast ranks wait in it for slow ones,
so that forward, backward and optimizer look alike on all ranks. Waiting for data does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOTEWORTHY_RATIO, NOTEWORTHY_SECONDS = 1.5, 0.005


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of one phase; seconds per step."""

    phase: str
    rank: int
    seconds: float
    median_seconds: float
    """Of all ranks."""

    @property
    def is_noteworthy(self) -> bool:
        """Whether it is more than chance and clock."""
        much = self.seconds - self.median_seconds > NOTEWORTHY_SECONDS
        return much and self.seconds > NOTEWORTHY_RATIO * self.median_seconds

    def __str__(self) -> str:
        phase = self.phase.replace("_", " ")
        return f"{phase}: rank {self.rank}, {self.seconds:.3f} s a step (median {self.median_seconds:.3f} s)"


def stragglers(seconds_of: Sequence[Mapping[str, float]], steps: int) -> list[Straggler]:
    """Return the slowest rank of each phase.

    Args:
        seconds_of: for each rank the seconds of each phase, all steps together.
        steps: how many that were.
    """
    if not steps or len(seconds_of) < 2:
        return []
    found = []
    for phase in seconds_of[0]:
        times = [seconds.get(phase, 0.0) / steps for seconds in seconds_of]
        slowest = max(range(len(times)), key=times.__getitem__)
        found.append(Straggler(phase, slowest, times[slowest], statistics.median(times)))
    return found
