"""What goes wrong in a run without ending it: values that are not finite, spikes, copies that drift apart."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipes.base import Health
from training.metrics import NonFiniteLoss, Step, first_non_finite

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.distributed import Ranks

_REMEMBERED_STEPS, _NEEDED_STEPS = 50, 10


@dataclass
class HealthWatch:
    """Looks at every step. Counts what it finds, says so, and ends the run where the recipe says that it should.

    Args:
        notify: prints one line.
    """

    settings: Health
    notify: Callable[[str], None]
    skipped_steps: list[int] = field(default_factory=list)
    loss_spikes: list[int] = field(default_factory=list)
    grad_norm_spikes: list[int] = field(default_factory=list)
    non_finite_steps: int = 0
    _compared_after: int = 0
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    _grad_norms: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))

    def skips(self, step: int, grad_norm: Tensor) -> bool:
        """Whether this step's gradients are to be left out of the weights. Waits for the device if the recipe may skip.

        Args:
            grad_norm: of the whole model, on the device, [], and so the same on all ranks.

        Raises:
            NonFiniteLoss: when too many steps in a row were skipped.
        """
        if self.settings.non_finite == "stop" or grad_norm.isfinite().item():
            return False
        self.skipped_steps.append(step)
        row = self.settings.max_skipped_steps
        if self.skipped_steps[-row:] == list(range(step - row + 1, step + 1)):
            raise NonFiniteLoss(
                f"step {step}: the gradient norm was not finite in {row} steps in a row (health.max_skipped_steps); none "
                "of them changed the weights. Lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the data"
            )
        self.notify(f"warning: step {step} skipped: gradient norm {grad_norm.item()}; the weights stay as they were")
        return True

    def look(self, steps: Sequence[Step]) -> None:
        """Look at the steps of a window, in order.

        Raises:
            NonFiniteLoss: at the first value that is not finite, unless such steps are skipped.
        """
        for step in steps:
            if first_non_finite([step]) is not None:
                self.non_finite_steps += 1
                if self.settings.non_finite == "stop":
                    raise NonFiniteLoss(
                        f"step {step.step}: loss {step.loss}, gradient norm {step.grad_norm}; training stopped, what came "
                        "before is kept. Lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the data of this step"
                    )
                continue
            self._look_for_spikes(step)
            self._losses.append(step.loss)
            self._grad_norms.append(step.grad_norm)

    def _look_for_spikes(self, step: Step) -> None:
        if len(self._losses) < _NEEDED_STEPS:
            return
        mean, spread = statistics.fmean(self._losses), statistics.pstdev(self._losses)
        if self.settings.loss_spike and spread and step.loss > mean + self.settings.loss_spike * spread:
            self.loss_spikes.append(step.step)
            away = (step.loss - mean) / spread
            self.notify(f"warning: loss spike in step {step.step}: {step.loss:.4f}, {away:.1f} deviations above {mean:.4f}")
        median = statistics.median(self._grad_norms)
        if self.settings.grad_norm_spike and step.grad_norm > self.settings.grad_norm_spike * median:
            self.grad_norm_spikes.append(step.step)
            times = step.grad_norm / median
            self.notify(f"warning: gradient norm spike in step {step.step}: {step.grad_norm:.4g}, {times:.0f} times the median")

    def compare_copies(self, step: int, model: nn.Module, ranks: Ranks) -> None:
        """Compare the parameters that several ranks hold, if the recipe wants it and it has not been done for too long.

        Raises:
            CopiesDiffer: if they are not equal.
        """
        every = self.settings.checksum_every_steps
        if every and step // every > self._compared_after // every:
            from training.copies import require_equal_copies

            require_equal_copies(model, ranks)
            self._compared_after = step

    def section(self) -> dict[str, Any]:
        """Return what was found, for the record's section `quality`."""
        return {
            "non_finite_steps": self.non_finite_steps,
            "skipped_steps": self.skipped_steps,
            "loss_spikes": self.loss_spikes,
            "grad_norm_spikes": self.grad_norm_spikes,
        }
