"""How a Qwen3 is laid out before it runs: activation checkpointing, then compilation.

Both work in place, so that every parameter keeps its name and a checkpoint does not depend on the layout.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.qwen3.model import Qwen3


def parallelize(
    model: Qwen3,
    *,
    activation_checkpointing: Literal["none", "full"] = "none",
    compile_region: Literal["block", "model"] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
) -> None:
    """Apply a recipe's layout to the model, which may still be on the meta device.

    Args:
        activation_checkpointing: full: each block keeps its input only and recomputes the rest in the backward pass.
        compile_region: block: each block by itself, and all of them share one graph. model: one graph for the whole
            forward pass. None: eager.
        compile_kwargs: keywords of torch.compile. Every region gets the same objects, because dynamo shares a graph only
            between regions whose compile options are equal.
    """
    if activation_checkpointing == "full":
        for block in model.layers:
            recompute_in_backward(block)
    regions = {None: [], "block": model.layers, "model": [model]}[compile_region]
    for region in regions:
        region.compile(**(compile_kwargs or {}))


def recompute_in_backward(block: nn.Module) -> None:
    """Replace the block's forward by a checkpointed one. A wrapper module would rename every parameter below it."""
    block.forward = MethodType(_checkpointed_forward, block)


def _checkpointed_forward(block: nn.Module, *inputs: Tensor | None) -> Tensor:
    # A block draws no random numbers, so there is no generator state to save and restore around the recomputation.
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False, preserve_rng_state=False)
