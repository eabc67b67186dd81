"""The part of the vocabulary that is about what a run leaves behind when it dies, and when it should."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is written besides the record, and what a run goes on from."""

    every_steps: int = 0
    """Save after every n-th step and after the last. 0: only when the run is asked to stop before its end."""
    folder: str | None = None
    """Where to: a folder that all ranks share, or a URL that fsspec knows, for example s3://bucket/run. None: `checkpoints` in
    the run's folder, or where the resumed run has its own."""
    asynchronous: bool = True
    """The loop waits only until the state is copied to host memory; a thread writes it. False: it waits for all of it."""
    keep_last: int = 2
    """Newest complete checkpoints that stay. An old one goes only when a newer one is complete."""
    keep_every_steps: int = 0
    """Checkpoints of every n-th step stay for ever. 0: none do."""
    resume: str | None = None
    """Go on from a checkpoint. latest: the newest complete one of this recipe, as `--resume` says. auto: the same if there is
    one, else from the start. Or a path: of a run, of its checkpoints, or of one of them."""
    allow_change: tuple[str, ...] = ()
    """Fields that may differ from the resumed run's, for example training.steps."""
    export: bool = False
    """Write the final weights as a Hugging Face folder (safetensors, config, tokenizer) inside the run folder."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """What counts as going wrong, and what is done about it."""

    non_finite: Literal["stop", "skip"] = "stop"
    """After a NaN or an infinite loss or gradient. stop: end the run, seen at the next window's edge. skip: leave such a step
    out of the weights and count it; the device is then waited for in every step."""
    max_skipped_steps: int = 10
    """With skip: so many in a row end the run after all."""
    loss_spike: float = 8.0
    """Warn of a loss this many standard deviations above the mean of the 50 steps before it. 0: never."""
    grad_norm_spike: float = 20.0
    """Warn of a gradient norm this many times the median of the 50 steps before it. 0: never."""
    checksum_every_steps: int = 0
    """Compare the parameters that several ranks hold, bit for bit, after every n-th step. 0: never."""
