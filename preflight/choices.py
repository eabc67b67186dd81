"""Variants of a recipe that preflight compares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.base import Recipe

WORK = ("seq_len", "local_batch_size", "global_batch_size", "dtype")
"""Fields of recipes.base.Training that, with the model and the ranks, say how much a step is."""


def with_choice(recipe: Recipe, activation_checkpointing: Any = None, local_batch_size: int | None = None) -> Recipe:
    """Return the recipe with another kind of checkpointing, or another local batch and as many accumulation steps."""
    if activation_checkpointing is not None:
        recipe = replace(recipe, parallel=replace(recipe.parallel, activation_checkpointing=activation_checkpointing))
    if local_batch_size is None:
        return recipe
    ranks = recipe.parallel.ranks
    steps = recipe.accumulation_steps(ranks)
    whole = local_batch_size * recipe.data_parallel_size(ranks) * steps if steps > 1 else None
    return replace(recipe, training=replace(recipe.training, local_batch_size=local_batch_size, global_batch_size=whole))
