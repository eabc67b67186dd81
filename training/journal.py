"""Where the numbers of a running run go: the record, the console and TensorBoard, at every window edge."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from recipes.base import Recipe
from training.compile import Compilation
from training.console import Console
from training.flops import implausible, mfu
from training.health import HealthWatch
from training.metrics import Meter, Window, steady
from training.record import RunRecord
from training.tracker import SafeTracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class Journal:
    """Ends windows and passes them on.

    Args:
        flops_per_token: under the `torchtitan` numerator. None: unknown, no MFU.
        world_size: devices that share the work.
        first_step: number of the first optimizer step here: a resumed run begins later than 1.
    """

    recipe: Recipe
    record: RunRecord
    console: Console
    meter: Meter
    flops_per_token: float | None
    world_size: int = 1
    first_step: int = 1
    peak_flops: float | None = None
    windows: list[Window] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    health: HealthWatch = field(init=False)
    _tensorboard: SummaryWriter | None = None
    _tracker: SafeTracker | None = None
    _warned: bool = False

    def __post_init__(self) -> None:
        self.health = HealthWatch(self.recipe.health, self.console.note)

    @property
    def last_loss(self) -> float | None:
        """Of the newest step that was read from the device. None: of none yet."""
        return self.windows[-1].steps[-1].loss if self.windows else None

    def open_trackers(self) -> None:
        """Start TensorBoard's event file and the tracker's run. Imports take seconds: do it where no window is measured."""
        run = self.recipe.run
        if run.tracker != "none" and self.record.writes:
            self._tracker = SafeTracker(run.tracker, run.tracker_project, self.record.content, self.console.note)
        if self.recipe.run.tensorboard and self.record.writes:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.record.folder / "tensorboard"))
        for window in self.windows:
            self._write_scalars(window)

    def end_window(self, disturbed_by: str | None) -> None:
        """Synchronise, write down the window's steps and print it.

        Raises:
            NonFiniteLoss: after everything was written down, naming the step, if the recipe stops there.
        """
        window = self.meter.end(disturbed_by)
        self.windows.append(window)
        self.record.append_steps(window.steps)
        self._write_scalars(window)
        self.console.window(window, self.share(window.tokens_per_second), self.recipe.run.deterministic)
        self.health.look(window.steps)

    def add_compilations(self, compilations: Sequence[Compilation]) -> bool:
        """Announce each compilation after step 1 with its cause, and return whether there was any at all."""
        for compilation in compilations:
            if compilation.step > self.first_step:
                self.console.note(
                    f"late compile in step {compilation.step}: {compilation.seconds:.2f} s, {compilation.function}, "
                    f"{compilation.direction}: {compilation.cause}"
                )
        return bool(compilations)

    def add_validation(self, step: int, loss: float, tokens: int) -> None:
        """Write down one validation round."""
        self.validations.append({"step": step, "loss": loss, "tokens": tokens, "batches": self.recipe.validation.num_batches})
        self.console.note(f"validation after step {step}: loss {loss:.4f} over {tokens:,} tokens")
        self._add_scalars({"loss/validation": loss}, step)

    def share(self, tokens_per_second: float | None) -> float | None:
        """Return the MFU at this global rate, warning once if it cannot be right."""
        share = mfu(self.flops_per_token, tokens_per_second, self.world_size, self.peak_flops)
        warning = implausible(share)
        if warning and not self._warned:
            self._warned = True
            self.console.note(f"warning: {warning}")
        return share

    def _write_scalars(self, window: Window) -> None:
        for step in window.steps:
            values = {"loss/train": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}
            if step is window.steps[-1]:
                values["speed/tokens_per_second"] = window.tokens_per_second
            self._add_scalars(values, step.step)

    def _add_scalars(self, values: dict[str, float], step: int) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.scalars(values, step)

    def quality(self) -> dict[str, Any]:
        """Return the quality section of the run record."""
        steps = [step for window in self.windows for step in window.steps]
        last_window = [step.loss for step in self.windows[-1].steps] if self.windows else []
        return {
            "loss_first": steps[0].loss if steps else None,
            "loss_last": steps[-1].loss if steps else None,
            "loss_last_window": statistics.fmean(last_window) if last_window else None,
            "grad_norm_last": steps[-1].grad_norm if steps else None,
            **self.health.section(),
            "steps_recorded": len(steps),
            "validation": self.validations,
        }

    def speed(self) -> dict[str, Any]:
        """Return the part of the timing section that comes after the first step.

        The speed of a deterministic run is not quoted: slower kernels were chosen on purpose.
        """
        later = [window for window in self.windows if window.steps[0].step > self.first_step]
        seconds = sum(window.seconds for window in later)
        tokens = sum(step.tokens for window in later for step in window.steps)
        summary = steady(self.windows, self.first_step)
        quoted = not self.recipe.run.deterministic
        return {
            "speed_quoted": quoted,
            "steady": asdict(summary) if summary and quoted else None,
            "tokens_per_second_after_first_step": tokens / seconds if seconds and quoted else None,
            "windows": [
                {
                    "first_step": window.steps[0].step,
                    "last_step": window.steps[-1].step,
                    "seconds": window.seconds,
                    "tokens_per_second": window.tokens_per_second if quoted else None,
                    "valid_tokens_per_second": window.valid_tokens_per_second if quoted else None,
                    "disturbed_by": window.disturbed_by,
                }
                for window in self.windows
            ],
        }

    def close(self) -> None:
        """Flush what is still open."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def finish(self, status: str, cause: str | None) -> None:
        """Close the record, and tell the tracker what it says."""
        self.record.finish(status, cause)
        if self._tracker is not None:
            self._tracker.close(self.record.content, self.record.folder)
