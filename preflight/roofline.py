"""The least time that a step can take, from its FLOPs and bytes at the chip's peaks.

A bound, not a forecast: no kernel reaches its peak, and what does not overlap adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.chip_limits import ChipLimits
from preflight.operations import Traffic
from preflight.rehearsal import Rehearsal

_ON_THE_WIRE = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "broadcast": 1}
"""How often the larger side of a message crosses a rank's links, but for the part that the rank has itself."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of one rank's step at the peaks. None: the chip or its peak is unknown."""

    compute_seconds: float | None
    """FLOPs, recomputation included, at the peak of the products' type."""
    memory_seconds: float | None
    """Bytes that must cross the chip's own memory, each tensor read or written once where it is used."""
    link_seconds: float | None
    """Bytes between chips. Messages among the cores of one chip are not counted."""
    memory_bytes: float
    link_bytes: float | None

    @property
    def overlapped_seconds(self) -> float | None:
        """If everything overlaps: the largest of the three."""
        known = [self.compute_seconds, self.memory_seconds, self.link_seconds]
        return None if None in known else max(part for part in known if part is not None)

    @property
    def serial_seconds(self) -> float | None:
        """If nothing overlaps: their sum."""
        known = [self.compute_seconds, self.memory_seconds, self.link_seconds]
        return None if None in known else sum(part for part in known if part is not None)


def roofline(
    rehearsal: Rehearsal, accumulation_steps: int, peak_flops: float | None, limits: ChipLimits | None, sizes: Mapping[str, int]
) -> Roofline:
    """Return the bound of a rehearsed step.

    Args:
        peak_flops: FLOP/s of one rank.
        limits: of one rank.
        sizes: ranks along each axis of the mesh.
    """
    memory = _least_memory_traffic(rehearsal, accumulation_steps)
    link = None if limits is None else _link_bytes(rehearsal.collectives, sizes, limits.ranks_per_chip)
    return Roofline(
        compute_seconds=rehearsal.total_flops / peak_flops if peak_flops else None,
        memory_seconds=memory / limits.memory_bandwidth if limits else None,
        link_seconds=link / limits.link_bandwidth if limits and link is not None else None,
        memory_bytes=memory,
        link_bytes=link,
    )


def _least_memory_traffic(rehearsal: Rehearsal, accumulation_steps: int) -> float:
    """Activations are written and read; gathered weights and gradients too; AdamW reads four tensors and writes three."""
    activations = 2 * rehearsal.activation_bytes * accumulation_steps
    messages = 2 * sum(messages.bytes for messages in rehearsal.collectives)
    weights = 0 if messages else 2 * rehearsal.parameter_bytes * accumulation_steps
    update = 2 * rehearsal.parameter_bytes + rehearsal.gradient_bytes + 2 * rehearsal.optimizer_bytes
    return activations + messages + weights + update


def _link_bytes(collectives: Sequence[Traffic], sizes: Mapping[str, int], ranks_per_chip: int) -> float | None:
    total = 0.0
    for messages in collectives:
        ranks, crossings = sizes.get(messages.group), _ON_THE_WIRE.get(messages.kind)
        if ranks is None or crossings is None:
            return None
        inside = messages.group == "tp" and ranks <= ranks_per_chip  # tensor-parallel ranks are neighbours
        total += 0 if inside else crossings * messages.bytes * (ranks - 1) / ranks
    return total
