"""Memory and FLOPs at any depth and batch, from four rehearsals of a shorter model.

A moment of a step, named by where it is, holds memory that grows in a straight line with the number of blocks and with the
number of samples. So two depths and two batches give every moment at any depth and batch, and the fullest of them is the peak.
Where a model's blocks are not all alike, the depths are whole periods of their pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from preflight.choices import with_choice
from preflight.rehearsal import Rehearsal
from recipes.base import Recipe

_DEPTHS, _BATCHES = (4, 6), (1, 2)
LARGEST_BATCH = 4096
"""Nobody asks for more samples of a sequence on one rank."""


@dataclass(frozen=True)
class _Corner:
    moments: dict[tuple[str, str], int]
    flops: int


@dataclass(frozen=True)
class Scaling:
    """One recipe with any number of blocks and samples; made by `scaling_of`."""

    corners: dict[tuple[int, int], _Corner]
    """By number of blocks and local batch size."""
    num_layers: int
    """Blocks of the recipe's own model."""

    def peak_bytes(self, batch: int) -> float:
        """Return the most memory of a steady step."""
        moments = set.intersection(*(set(corner.moments) for corner in self.corners.values()))
        weights = self._weights(batch)
        return max(sum(weight * self.corners[at].moments[moment] for at, weight in weights.items()) for moment in moments)

    def total_flops(self, batch: int) -> float:
        """Return one rank's FLOPs of a step."""
        return sum(weight * self.corners[at].flops for at, weight in self._weights(batch).items())

    def largest_batch(self, budget_bytes: float) -> int:
        """Return the most samples of one forward pass whose step fits, up to LARGEST_BATCH. 0: not even one does."""
        low, high = 0, LARGEST_BATCH  # more samples never need less memory
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_bytes(middle) <= budget_bytes else (low, middle - 1)
        return low

    def _weights(self, batch: int) -> dict[tuple[int, int], float]:
        (shallow, deep), (one, two) = _DEPTHS, _BATCHES
        deeper, more = (self.num_layers - shallow) / (deep - shallow), (batch - one) / (two - one)
        return {
            (shallow, one): (1 - deeper) * (1 - more),
            (deep, one): deeper * (1 - more),
            (shallow, two): (1 - deeper) * more,
            (deep, two): deeper * more,
        }


def scaling_of(recipe: Recipe, num_layers: int, rehearsed: Callable[[Recipe], Rehearsal]) -> Scaling:
    """Rehearse the recipe with few blocks.

    Args:
        num_layers: blocks of its own model.
        rehearsed: rehearses a recipe.
    """
    corners = {}
    for depth in _DEPTHS:
        shorter = replace(recipe, model=replace(recipe.model, num_layers=depth))
        for batch in _BATCHES:
            rehearsal = rehearsed(with_choice(shorter, local_batch_size=batch))
            moments = {(phase, _from_an_end(place, depth)): size for (phase, place), size in rehearsal.peaks.items()}
            corners[depth, batch] = _Corner(moments, rehearsal.total_flops)
    return Scaling(corners, num_layers)


def _from_an_end(place: str, depth: int) -> str:
    """Return the name of a place with blocks counted from the nearer end, so that all depths have those of the shallowest."""
    match = re.fullmatch(r"layers\.(\d+)", place)
    if match is None:
        return place
    index = int(match[1])
    return f"layers.{index if index < depth // 2 else index - depth}"
