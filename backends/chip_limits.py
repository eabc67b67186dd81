"""Memory and bandwidth of accelerators, each with where the number comes from; the peaks of their arithmetic are in peak_flops.

As there, a chip is looked up by its exact name, and one that is not listed has no limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.peak_flops import table_name


@dataclass(frozen=True)
class ChipLimits:
    """What one chip, or a rank's share of it, holds and moves."""

    chip: str
    memory_bytes: float
    memory_bandwidth: float
    """Bytes/s between the chip and its own memory."""
    link_bandwidth: float
    """Bytes/s between this chip and the others of its host, all directions together, as its page prints it."""
    source: str
    ranks_per_chip: int = 1
    """How many ranks share one chip; the numbers are those of one rank."""

    def shared_by(self, ranks: int) -> ChipLimits:
        """Return one rank's share where so many share the chip."""
        memory, bandwidth, link = self.memory_bytes / ranks, self.memory_bandwidth / ranks, self.link_bandwidth / ranks
        return ChipLimits(self.chip, memory, bandwidth, link, self.source, ranks)


_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

LIMITS: tuple[ChipLimits, ...] = (
    ChipLimits("Trainium2", 96 * 2**30, 2.9e12, 1.28e12, _NEURON + "trainium2.html"),
    ChipLimits("Trainium3", 144 * 2**30, 4.9e12, 2.56e12, _NEURON + "trainium3.html"),
    ChipLimits("H100 SXM", 80e9, 3.35e12, 0.9e12, _NVIDIA + "h100/"),
    ChipLimits("H100 NVL", 94e9, 3.9e12, 0.6e12, _NVIDIA + "h100/"),
    ChipLimits("H200", 141e9, 4.8e12, 0.9e12, _NVIDIA + "h200/"),
)


def limits_of(chip: str | None) -> ChipLimits | None:
    """The limits of one whole chip. None: it is not listed.

    Args:
        chip: name or alias, as in the peak table.
    """
    listed = table_name(chip)
    return next((limits for limits in LIMITS if limits.chip == listed), None)
