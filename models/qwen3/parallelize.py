"""How a Qwen3 is laid out before it runs: tensor parallel, activation checkpointing, compilation, data parallel.

In this order, and in place, so that every parameter keeps its name and a checkpoint does not depend on the layout.

Tensor parallel splits each matrix and, between blocks, the sequence. Between the split modules tensors are plain: each rank
holds its own heads, tokens or rows of the vocabulary, and attention never sees that there are others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.qwen3.model import Block, OutputProjection, Qwen3, RMSNorm, rms_norm, sum_of_cross_entropies

SEQUENCE, WHOLE = Shard(1), Replicate()
"""Activations [B, T, D] between the split modules: each rank its tokens, or each all of them."""


def parallelize(
    model: Qwen3,
    *,
    tensor_mesh: DeviceMesh | None = None,
    activation_checkpointing: Literal["none", "selective", "full"] = "none",
    compile_region: Literal["block", "model"] | None = None,
    compile_kwargs: dict[str, Any] | None = None,
    shard: Callable[[Qwen3, Iterable[list[nn.Module]]], None] | None = None,
) -> None:
    """Apply a recipe's layout to the model, which may still be on the meta device.

    Args:
        tensor_mesh: one axis, the ranks that share each matrix. Forward and backward then need torch's loss_parallel context.
        activation_checkpointing: full: each block keeps its input only and recomputes the rest in the backward pass.
            selective: it keeps what is dear to compute besides.
        compile_region: block: each block by itself, and all of them share one graph. model: one graph for the whole
            forward pass. None: eager.
        compile_kwargs: keywords of torch.compile.
        shard: splits the parameters over the data-parallel ranks: called with the model and its units in the order of the
            forward pass, each a list of modules whose weights are gathered together.
    """
    if tensor_mesh is not None:
        split_matrices(model, tensor_mesh)
    kwargs = compile_kwargs or {}
    # Only forward methods are replaced: hooks that gather and free weights stay outside of the graphs, and names as they are.
    forward: Callable[..., Tensor] = Block.forward
    if activation_checkpointing == "selective":
        forward = recomputed(forward, context_fn=_keep_what_is_dear)  # a choice among operators, which the compiler has to see
    if compile_region == "block":
        forward = torch.compile(forward, **kwargs)
    if activation_checkpointing == "full":
        forward = recomputed(forward)
    if forward is not Block.forward:
        for block in model.layers:
            block.forward = MethodType(forward, block)
    if compile_region == "model":
        model.forward = MethodType(torch.compile(Qwen3.forward, **kwargs), model)
    if shard is not None:
        shard(model, units(model))


def units(model: Qwen3) -> list[list[nn.Module]]:
    """The parts whose weights are gathered at a time, in the order of the forward pass.

    Embedding and output projection are the largest: each is a unit of its own, or of both where they are one matrix.
    """
    first: list[nn.Module] = [model.tok_embeddings]
    last: list[nn.Module] = [model.norm, model.output]
    blocks = [[block] for block in model.layers]
    if model.config.tied:
        return [first + last, *blocks]
    return [first, *blocks, last]


# --- tensor parallel ------------------------------------------------------------------------------------------------------


def split_matrices(model: Qwen3, mesh: DeviceMesh) -> None:
    """Split every matrix over the ranks of a one-axis mesh, and let each rank keep its part of the sequence between blocks."""
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(SEQUENCE, None, None, None), desired_input_layouts=(WHOLE, None, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(WHOLE,)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward.w3": ColwiseParallel(),
    }
    model.tok_embeddings.weight = nn.Parameter(distribute_tensor(model.tok_embeddings.weight, mesh, [Shard(0)]))
    model.tok_embeddings.forward = MethodType(_forward_of_split_embedding, model.tok_embeddings)
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))
    model.output.forward = MethodType(_forward_over_vocabulary, model.output)
    model.tie()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [WHOLE]))
            module.forward = MethodType(_forward_of_copied_norm, module)


def _forward_of_split_embedding(embedding: nn.Embedding, tokens_BT: Tensor) -> Tensor:
    """Look up the tokens whose rows this rank has. The sum over the ranks is the embedding, of which each keeps its tokens.

    RowwiseParallel does the same, but leaves every rank with the gradient of the whole vocabulary.
    """
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    mesh, rows_VD = weight.device_mesh, weight.to_local()
    rows_BT = tokens_BT - mesh.get_local_rank() * rows_VD.shape[0]
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= rows_VD.shape[0])
    x_BTD = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), rows_VD)
    x_BTD = x_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0)
    x_BTD = DTensor.from_local(x_BTD, mesh, [Partial()], run_check=False).redistribute(placements=[SEQUENCE]).to_local()
    return x_BTD.clone()  # once the collective behind it has arrived: a compiled block takes no promise of a tensor


def _forward_of_copied_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """Normalise this rank's tokens or heads. Every rank has the whole weight, so its gradient is the sum over the ranks."""
    weight = norm.weight
    assert isinstance(weight, DTensor)
    # The redistribution changes nothing on the way forward; on the way back it is the sum.
    weight = weight.redistribute(placements=[WHOLE]).to_local(grad_placements=[Partial()])
    return rms_norm(x, weight, norm.eps)


def _forward_over_vocabulary(output: OutputProjection, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
    """Compute this rank's rows of the vocabulary for all tokens, and the loss from everybody's; logits are gathered."""
    weight = output.weight
    assert isinstance(weight, DTensor)
    mesh = weight.device_mesh
    x_BTD = DTensor.from_local(x_BTD, mesh, [SEQUENCE], run_check=False).redistribute(placements=[WHOLE])
    x_BTD, rows_VD = x_BTD.to_local(grad_placements=[Partial()]), weight.to_local()

    def split(logits: Tensor) -> DTensor:
        return DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)

    if labels_BT is None:
        return split(F.linear(x_BTD, rows_VD)).redistribute(placements=[WHOLE]).to_local()
    loss = sum_of_cross_entropies(x_BTD, rows_VD, labels_BT, split)
    assert isinstance(loss, DTensor)
    return loss.to_local().clone()  # not a view: FSDP hangs its hooks on what a unit returns


# --- activation checkpointing ---------------------------------------------------------------------------------------------

_SAVED = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.reduce_scatter_tensor",
)
"""Operators whose results selective checkpointing keeps: attention, and the collectives that end a split pair of matrices."""
_PRODUCTS = ("aten.mm", "aten.linear")
"""Matrix products, of which it keeps every second. TorchNeuron does not take aten.linear apart, so a list with mm alone would
keep nothing there."""


def recomputed(forward: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Return a forward method that keeps its inputs and computes the rest again in the backward pass."""

    def recompute(block: nn.Module, *inputs: Tensor | None) -> Tensor:
        # A block draws no random numbers, so there is no generator state to save and restore around the recomputation.
        return checkpoint(forward, block, *inputs, use_reentrant=False, preserve_rng_state=False, **options)

    return recompute


def _keep_what_is_dear():
    return create_selective_checkpoint_contexts(saving_policy())


def saving_policy() -> Callable[..., CheckpointPolicy]:
    """Return a function that says for each operator of one block, in order, whether its result is kept."""
    products = {False: 0, True: 0}
    """Matrix products so far, in the forward pass and in the recomputation: both must decide alike."""

    def decide(context, operator, *args, **kwargs) -> CheckpointPolicy:
        name = str(operator).removesuffix(".default")
        keep = name in _SAVED
        if name in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
