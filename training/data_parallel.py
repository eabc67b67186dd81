"""Splitting or copying a model over the data-parallel ranks: one function per kind, chosen by the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from recipes.base import Recipe
from training.distributed import Ranks
from training.simple_fsdp import simple_fsdp

Units = Iterable[list[nn.Module]]
"""Parts of a model whose weights are gathered together, in the order of the forward pass."""
Shard = Callable[[nn.Module, Units], None]


def sharding(recipe: Recipe, ranks: Ranks) -> Shard | None:
    """Return what splits the parameters over the ranks, as the recipe says. None: they stay whole.

    Gradients are averaged over the data-parallel ranks.
    """
    mesh = ranks.axis("dp_replicate", "dp_shard")
    if mesh is None or recipe.parallel.data_parallel_wrapper == "ddp":
        return None
    dtype = multiply_dtype(recipe)
    if recipe.parallel.data_parallel_wrapper == "fsdp2":
        return partial(_fsdp2, mesh=mesh, dtype=dtype, recipe=recipe)
    return partial(_simple_fsdp, mesh=mesh, dtype=dtype, recipe=recipe)


def multiply_dtype(recipe: Recipe) -> torch.dtype | None:
    """Return the type of the matrix products where it is not the parameters' own."""
    return torch.bfloat16 if recipe.training.dtype == "bfloat16" else None


def replicated(model: nn.Module, recipe: Recipe, ranks: Ranks) -> nn.Module:
    """Return what the loop calls instead of the model: with ddp a wrapper that averages gradients, else the model."""
    if ranks.data == 1 or recipe.parallel.data_parallel_wrapper != "ddp":
        return model
    # The rotary table is computed alike everywhere: there is no buffer to send before each forward pass.
    return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def reshard(model: nn.Module) -> None:
    """Give back the weights that FSDP2 leaves gathered after a forward pass, because it expects a backward pass to need them.

    Until then a parameter of the model is not the one that the optimizer knows, and has the type of the products.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fsdp2(model: nn.Module, units: Units, *, mesh: DeviceMesh, dtype: torch.dtype | None, recipe: Recipe) -> None:
    # Inputs are not cast: the rotary table is one of them and stays fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False)
    units = list(units)
    for unit in units:
        # The backward pass begins with the last unit: what it has just gathered is still needed.
        reshard = recipe.parallel.reshard_after_forward and unit is not units[-1]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if recipe.parallel.prefetch_blocks:
        _prefetch([unit[0] for unit in units], recipe.parallel.prefetch_blocks)


def _prefetch(modules: Sequence[nn.Module], ahead: int) -> None:
    """Gather the weights of the next `ahead` units while one computes, in either direction."""
    for index, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(list(modules[index + 1 : index + 1 + ahead]))  # type: ignore[arg-type]
        module.set_modules_to_backward_prefetch(list(reversed(modules[max(0, index - ahead) : index])))  # type: ignore[arg-type]


def _simple_fsdp(model: nn.Module, units: Units, *, mesh: DeviceMesh, dtype: torch.dtype | None, recipe: Recipe) -> None:
    simple_fsdp(
        model,
        mesh,
        param_dtype=dtype,
        reduce_dtype=torch.float32 if dtype else None,
        reshard_after_forward=recipe.parallel.reshard_after_forward,
    )
