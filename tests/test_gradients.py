"""The gradient norm is that of one process with the whole model, however its parameters are spread."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import call
from training.gradients import clip_grad_norm_


class Model(nn.Module):
    """An MLP between a norm that all ranks have, and a bias with fewer elements than ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x)))) * self.scale


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def reference() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(torch.randn(4, 8)).square().sum().backward()
    return model


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_one_process_agrees_with_torch(norm_type: float, max_norm: float):
    ours, theirs = reference(), reference()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert clip_grad_norm_(ours.parameters(), max_norm, norm_type).item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_d24_the_infinity_norm_is_the_largest_gradient():
    model = reference()
    largest = max(gradient.abs().max().item() for gradient in gradients(model))
    assert clip_grad_norm_(model.parameters(), math.inf, math.inf).item() == largest


def test_a_large_gradient_is_measured_as_in_double_precision():
    parameter = nn.Parameter(torch.empty(4096, 2560))
    parameter.grad = torch.randn(4096, 2560, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).item()
    assert clip_grad_norm_([parameter], math.inf).item() == pytest.approx(exact, rel=2e-7)


def test_a_non_finite_gradient_is_reported():
    model = reference()
    model.up.weight.grad[0, 0] = math.nan
    assert clip_grad_norm_(model.parameters(), 1.0).isnan()


def compare(spread: nn.Module, whole: nn.Module) -> None:
    """Hold norms and clipped gradients of a spread model, whose gradients are those of `whole`, against it."""
    for norm_type in (2.0, math.inf, 1.0):
        ours, theirs = copy.deepcopy(gradients(spread)), copy.deepcopy(gradients(whole))
        expected = nn.utils.get_total_norm(gradients(whole), norm_type).item()
        for max_norm in (math.inf, expected / 2):
            norm = clip_grad_norm_(spread.parameters(), max_norm, norm_type)
            assert not isinstance(norm, DTensor)
            assert norm.item() == pytest.approx(expected, rel=1e-5), (norm_type, max_norm)
        scaled = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients(spread)]
        torch.testing.assert_close(scaled, [gradient / 2 for gradient in gradients(whole)], rtol=1e-4, atol=1e-6)
        for model, kept in ((spread, ours), (whole, theirs)):
            for gradient, value in zip(gradients(model), kept, strict=True):
                gradient.copy_(value)


def spread_gradients(model: nn.Module, whole: nn.Module) -> nn.Module:
    """Give each parameter of `model` the gradient of `whole`, laid out as the parameter is."""
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        if isinstance(ours, DTensor):
            ours.grad = distribute_tensor(theirs.grad.clone(), ours.device_mesh, ours.placements)
        else:
            ours.grad = theirs.grad.clone()
    return model


def check_two_ranks() -> None:
    whole, mesh = reference(), init_device_mesh("cpu", (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    # D19: a plan for the matrices alone leaves the norm and the scale whole, beside DTensors.
    partial = spread_gradients(parallelize_module(reference(), mesh, plan), whole)
    assert {isinstance(parameter, DTensor) for parameter in partial.parameters()} == {True, False}
    compare(partial, whole)

    # D18: copies on all ranks count once.
    copied = parallelize_module(reference(), mesh, plan)
    copied.norm.weight = nn.Parameter(distribute_tensor(copied.norm.weight, mesh, [Replicate()]))
    compare(spread_gradients(copied, whole), whole)

    # The one-element scale is on one rank only.
    sharded = reference()
    fully_shard(sharded, mesh=mesh)
    compare(spread_gradients(sharded, whole), whole)


def check_four_ranks() -> None:
    whole, mesh = reference(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = parallelize_module(reference(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (both.up, both.down):
        fully_shard(module, mesh=mesh["dp"])
    compare(spread_gradients(both, whole), whole)

    replicated = reference()
    fully_shard(replicated, mesh=mesh)  # two axes: sharded over the second, copies over the first
    compare(spread_gradients(replicated, whole), whole)

    # Parameters on two different meshes in one model.
    mixed = reference()
    fully_shard(mixed.up, mesh=mesh["dp"])
    fully_shard(mixed.down, mesh=mesh["tp"])
    compare(spread_gradients(mixed, whole), whole)


@pytest.mark.distributed
def test_d18_d19_two_ranks():
    call(check_two_ranks, 2)


@pytest.mark.distributed
def test_d17_four_ranks():
    call(check_four_ranks, 4)
