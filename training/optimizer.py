"""AdamW and its learning rate. The schedule is a pure function of the step, so a resumed run cannot drift."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from recipes.base import Optimizer, RecipeError


def build_optimizer(model: nn.Module, settings: Optimizer, implementations: Sequence[str]) -> tuple[torch.optim.AdamW, str]:
    """Return AdamW over the model's parameters, and which implementation it is.

    Args:
        implementations: those that the device has, fastest first.

    Raises:
        RecipeError: if the recipe asks for an implementation that the device does not have.
    """
    chosen = implementations[0] if settings.implementation == "auto" else settings.implementation
    if chosen not in implementations:
        raise RecipeError(
            f"optimizer.implementation: got {chosen!r}, allowed on this device: auto, {', '.join(implementations)}"
        )
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=chosen == "fused",
        foreach=chosen == "foreach",
    )
    return optimizer, chosen


def learning_rate(step: int, total_steps: int, settings: Optimizer) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1.

    Linear warm-up reaches the peak at step warmup_steps. Then `cosine` falls along half a wave to min_lr_ratio x lr at the
    last step; `wsd` stays at the peak and falls in a straight line over the last decay_fraction of the run; `constant`
    stays.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    decay_start = settings.warmup_steps
    if settings.schedule == "wsd":
        decay_start = max(decay_start, round(total_steps * (1 - settings.decay_fraction)))
        if step <= decay_start:
            return settings.lr
    progress = min(1.0, (step - decay_start) / max(1, total_steps - decay_start))
    remaining = 1 - progress if settings.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the next step of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
