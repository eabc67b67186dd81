"""Whether the ranks that hold the same part of a parameter hold the same values."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from training.initialise import local_part
from training.record import RunFailed

if TYPE_CHECKING:
    from training.distributed import Ranks


class CopiesDiffer(RunFailed):
    """Two ranks that should hold the same values do not; the message names both and the parameter."""


def require_equal_copies(model: nn.Module, ranks: Ranks) -> None:
    """Compare every part of every parameter that several ranks hold, bit for bit. All ranks must call it.

    Raises:
        CopiesDiffer: on all ranks.
    """
    own: dict[tuple[str, str], str] = {}
    for name, parameter in model.named_parameters():
        local, part = local_part(parameter.detach())
        data = local.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        own[name, str(part)] = hashlib.sha256(data).hexdigest()
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, held in enumerate(ranks.gather(own)):
        for (name, part), digest in held.items():
            other, expected = first.setdefault((name, part), (rank, digest))
            if digest != expected:
                raise CopiesDiffer(
                    f"health.checksum_every_steps: rank {rank} and rank {other} no longer hold the same {name}; a device or a "
                    "collective computes wrongly. Go on from the last checkpoint with --resume, on other hardware"
                )
