"""Initial weights do not depend on how many ranks draw them, nor on what each of them keeps."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from models.qwen3.config import FLAVORS, tiny
from models.qwen3.model import Qwen3
from models.qwen3.parallelize import parallelize
from recipes.base import Parallel, Recipe
from tests.ranks import call
from training.data_parallel import sharding
from training.distributed import Ranks
from training.initialise import draw, initialise, local_part
from training.world import World


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 100), columns=st.integers(1, 1100))
def test_a_part_is_drawn_as_in_the_whole(data, rows, columns):
    whole = draw(torch.Size((rows, columns)), (slice(0, rows), slice(0, columns)), 7)
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    part = (slice(top, data.draw(st.integers(top, rows))), slice(left, data.draw(st.integers(left, columns))))
    assert torch.equal(draw(torch.Size((rows, columns)), part, 7), whole[part])


def test_blocks_matrices_and_seeds_have_streams_of_their_own():
    model, other = (nn.ParameterList(nn.Parameter(torch.empty(64, 1024)) for _ in range(2)) for _ in range(2))
    initialise(((parameter, 1.0) for parameter in model), seed=0)
    initialise(((parameter, 1.0) for parameter in other), seed=1)
    blocks = [block for p in (*model, *other) for half in p.detach().split(32) for block in half.split(512, dim=1)]
    assert len({hashlib.sha256(block.contiguous().numpy().tobytes()).hexdigest() for block in blocks}) == 16
    assert all(abs(block.mean()) < 0.05 and abs(block.std() - 1) < 0.05 for block in blocks)


def test_threads_change_nothing():
    alone, shared = (nn.Parameter(torch.empty(100, 1500)) for _ in range(2))
    initialise([(alone, 0.5)], seed=0)
    initialise([(shared, 0.5)], seed=0, threads=4)
    assert torch.equal(alone, shared)


def test_a_plain_parameter_is_all_here():
    parameter = nn.Parameter(torch.empty(3, 5))
    local, part = local_part(parameter)
    assert local is parameter and part == (slice(0, 3), slice(0, 5))


def whole_state(tied: bool) -> dict[str, torch.Tensor]:
    model = Qwen3(tiny(FLAVORS["0.6B" if tied else "8B"]))
    initialise(model.initialisation(), seed=3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_every_layout() -> None:
    """D15: the same weights on all replicas, and those of one process, before anything is trained."""
    recipe = Recipe(name="layout")
    for tied in (False, True):
        expected = whole_state(tied)
        for parallel in (
            Parallel(),
            Parallel(data_parallel_replicate_degree=2),
            Parallel(tensor_parallel_degree=2),
            Parallel(tensor_parallel_degree=4),
            Parallel(data_parallel_wrapper="simple_fsdp", tensor_parallel_degree=2),
            Parallel(data_parallel_wrapper="ddp"),
        ):
            recipe = Recipe(name="layout", parallel=parallel)
            ranks = Ranks(recipe, World(dist.get_rank(), 4, dist.get_rank(), 4))
            axes = {"dp_replicate": ranks.replicas, "dp_shard": ranks.shards, "tp": ranks.tensor}
            axes = {name: size for name, size in axes.items() if size > 1}
            ranks.mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            with torch.device("meta"):
                model = Qwen3(tiny(FLAVORS["0.6B" if tied else "8B"]))
            parallelize(model, tensor_mesh=ranks.axis("tp"), shard=sharding(recipe, ranks))
            model.materialise(torch.device("cpu"))
            initialise(model.initialisation(), seed=3)

            found = dict(model.named_parameters())
            assert list(found) == list(expected), parallel
            held = sum(local_part(parameter)[0].numel() for parameter in found.values())
            assert held <= sum(p.numel() for p in expected.values()) / (ranks.shards * ranks.tensor) * 1.05 or ranks.shards == 1
            for name, parameter in found.items():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                assert torch.equal(full.detach(), expected[name]), (parallel, name)
                local, part = local_part(parameter)
                assert torch.equal(local.detach(), expected[name][part]), (parallel, name)
            # D10: one matrix in two places stays one matrix.
            weights = model.output._parameters["weight"], model.tok_embeddings._parameters["weight"]
            assert (weights[0] is weights[1]) is tied, parallel


@pytest.mark.distributed
def test_d10_d15_replicas_and_shards_begin_with_the_weights_of_one_process():
    call(check_every_layout, 4)
