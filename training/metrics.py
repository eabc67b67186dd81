"""Windows of optimizer steps, and what may be said about a run's speed.

The device is synchronised at window edges only: inside a window losses stay on the device and nothing waits for them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.record import RunFailed

if TYPE_CHECKING:
    from torch import Tensor


class NonFiniteLoss(RunFailed):
    """Training produced a NaN or an infinite loss; the message names the step."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. Tokens are global and those of the whole step, all accumulated micro-batches together."""

    step: int
    loss: float
    """Mean over the valid tokens, nats."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    tokens: int
    """Positions computed, padding and ignored labels included."""
    valid_tokens: int
    """Positions that carry a label."""


@dataclass(frozen=True)
class Window:
    """Consecutive optimizer steps between two synchronisations."""

    steps: tuple[Step, ...]
    seconds: float
    disturbed_by: str | None = None
    """What else happened inside, for example a compilation: such a window is not steady."""

    @property
    def seconds_per_step(self) -> float:
        """Divided by the steps that are really in the window."""
        return self.seconds / len(self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Global, padding included."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def valid_tokens_per_second(self) -> float:
        """Global, labelled positions only."""
        return sum(step.valid_tokens for step in self.steps) / self.seconds


@dataclass
class Meter:
    """Collects steps into windows.

    Args:
        synchronize: waits until the device has finished.
        clock: seconds, monotonic.
        sum_losses: reads losses from the device, each summed over the ranks that have different samples; called once a window.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    sum_losses: Callable[[Sequence[Tensor]], list[float]] = lambda losses: [loss.item() for loss in losses]
    _pending: list[tuple[int, Tensor, Tensor, float, int, int]] = field(default_factory=list)
    _began: float = 0.0

    def begin(self) -> None:
        """Start a window: what happened before, for example a validation, is not part of it."""
        self.synchronize()
        self._began = self.clock()

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, tokens: int, valid_tokens: int) -> None:
        """Note one step without waiting for the device.

        Args:
            loss: this rank's part of the step's mean loss, on the device, [].
            grad_norm: of the whole model, on the device, [].
        """
        self._pending.append((step, loss, grad_norm, lr, tokens, valid_tokens))

    def end(self, disturbed_by: str | None = None) -> Window:
        """Synchronise, end the window and start the next one at the same moment."""
        self.synchronize()
        now = self.clock()
        losses = self.sum_losses([loss for _, loss, *_ in self._pending])
        steps = tuple(
            Step(step, loss, norm.item(), lr, tokens, valid)
            for (step, _, norm, lr, tokens, valid), loss in zip(self._pending, losses, strict=True)
        )
        window = Window(steps, now - self._began, disturbed_by)
        self._pending, self._began = [], now
        return window


def first_non_finite(steps: Sequence[Step]) -> Step | None:
    """Return the first step whose loss or gradient norm is NaN or infinite."""
    return next((step for step in steps if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))), None)


@dataclass(frozen=True)
class Steady:
    """Speed after the first step and without compilation: medians over windows, with their spread."""

    windows: int
    steps: int
    seconds_per_step_median: float
    seconds_per_step_min: float
    seconds_per_step_max: float
    tokens_per_second: float
    """Global; the median over windows."""
    valid_tokens_per_second: float


def steady(windows: Sequence[Window], first_step: int = 1) -> Steady | None:
    """Summarise the undisturbed windows after the first step. None: there is none, so there is no steady speed."""
    quiet = [window for window in windows if window.disturbed_by is None and window.steps[0].step > first_step]
    if not quiet:
        return None
    seconds = [window.seconds_per_step for window in quiet]
    return Steady(
        windows=len(quiet),
        steps=sum(len(window.steps) for window in quiet),
        seconds_per_step_median=statistics.median(seconds),
        seconds_per_step_min=min(seconds),
        seconds_per_step_max=max(seconds),
        tokens_per_second=statistics.median(window.tokens_per_second for window in quiet),
        valid_tokens_per_second=statistics.median(window.valid_tokens_per_second for window in quiet),
    )


@dataclass(frozen=True)
class BreakEven:
    """Where a mode with a longer first step and a shorter later step overtakes another: total(N) = first + (N - 1) x step."""

    further_steps: float
    """Steps after the first until both have taken the same time."""
    ahead_from_step: int
    """First step, counted from 1, after which the overtaking mode has spent less time in all."""


def break_even(first_a: float, step_a: float, first_b: float, step_b: float) -> BreakEven | None:
    """Return where b overtakes a, or None if it never does.

    Args:
        first_a, first_b: first_step_seconds.
        step_a, step_b: seconds per steady step.
    """
    if first_b <= first_a and step_b <= step_a:
        return BreakEven(0.0, 1)
    if step_b >= step_a:
        return None
    further = (first_b - first_a) / (step_a - step_b)
    return BreakEven(further, math.floor(further) + 2)
