"""Sharded training is the training of one process, in every layout, eager and compiled, and gathers no more than it says.

Starting ranks takes longer than most checks, so one start serves all checks that need as many: two tests, for two workers.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models.qwen3.config import FLAVORS
from models.qwen3.model import Qwen3
from tests.ranks import call
from training.initialise import initialise
from training.simple_fsdp import simple_fsdp

pytestmark = pytest.mark.distributed


def _run_checks(names: Iterable[str]) -> None:
    """Run each check up to the first that fails: its partner may be in a collective, so there is no going on."""
    for name in names:
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            globals()[name]()
        except pytest.fail.Exception as failed:  # not an Exception, which is all that a rank can report
            raise AssertionError(str(failed)) from failed


# --- models ---------------------------------------------------------------------------------------------------------------

TOKENS = 6
"""Of one rank's batch."""


class Block(nn.Module):
    """Over two ranks, `up` is split evenly and the others are not."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding and an output projection, which may be one matrix."""

    def __init__(self, tied: bool = False, num_layers: int = 2, dim: int = 7, hidden: int = 6, vocabulary: int = 11):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(num_layers))
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.checkpointing = False
        self.tied = tied
        self.tie()

    def tie(self) -> None:
        if self.tied:
            self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.output(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, -2), ids.roll(1).flatten())


def batches(steps: int, ranks: int) -> Tensor:
    """Return token ids [steps, ranks, TOKENS]."""
    return torch.randint(9, (steps, ranks, TOKENS), generator=torch.Generator().manual_seed(1))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for (name, parameter), (expected_name, alone) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert name == expected_name
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name  # type: ignore[attr-defined]
        torch.testing.assert_close(whole(parameter.grad), whole(alone.grad), msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_trains_alike(model: nn.Module, alone: nn.Module, mesh: DeviceMesh, steps: int = 10) -> None:
    """Ten AdamW steps on the ranks' batches, and on all of them at once: losses, gradients, and weights at the end."""
    ranks = mesh.size()
    rank = dist.get_rank() // (dist.get_world_size() // ranks)  # tensor-parallel ranks, if any, lie side by side
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (model, alone)]
    for step, ids in enumerate(batches(steps, ranks)):
        loss, expected = loss_of(model, ids[rank]), torch.stack([loss_of(alone, part) for part in ids]).mean()
        loss.backward()
        expected.backward()
        losses = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss.detach())
        torch.testing.assert_close(torch.stack(losses).mean(), expected.detach(), rtol=1e-5, atol=0.0)
        if step in (0, steps - 1):
            assert_same_gradients(model, alone, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def flat_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


class Collectives(TorchDispatchMode):
    """Notes what each collective is given, and which storage each gather returns."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []
        self.gathered: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            self.calls.append((func.overloadpacket.__name__, args[0].dtype))
            if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
                self.gathered.append(StorageWeakRef(result.untyped_storage()))
        return result

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def alive(self, expected: int) -> int:
        """Return how many gathered tensors are still there. More than expected have a second to go: gloo's thread may hold the
        last one for some milliseconds longer than its collective takes."""
        ends = time.monotonic() + 1.0
        while (alive := sum(not storage.expired() for storage in self.gathered)) > expected and time.monotonic() < ends:
            time.sleep(0.001)
        return alive


# --- two ranks, eager -----------------------------------------------------------------------------------------------------


def check_training_is_that_of_one_process() -> None:
    for reshard in (True, False):
        alone, mesh = Stack(), flat_mesh()
        model = copy.deepcopy(alone)
        simple_fsdp(model, mesh, reshard_after_forward=reshard)
        assert_trains_alike(model, alone, mesh)


def check_shards_and_gradients_are_those_of_fully_shard() -> None:
    for mixed in (False, True):
        dtypes: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
        mesh, model = flat_mesh(), Stack()
        expected = copy.deepcopy(model)
        simple_fsdp(model, mesh, **dtypes)
        for block in expected.layers:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
        fully_shard(expected, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
        ids = batches(1, 2)[0, dist.get_rank()]
        losses = [loss_of(m, ids) for m in (model, expected)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert isinstance(ours, DTensor) and isinstance(theirs, DTensor)
            assert (ours.placements, ours.device_mesh, ours.dtype) == (theirs.placements, theirs.device_mesh, theirs.dtype), (
                name
            )
            assert torch.equal(ours.to_local(), theirs.to_local()), name
            assert ours.to_local().untyped_storage().nbytes() == 4 * ours.to_local().numel(), name  # not a view of the whole
        assert_same_gradients(model, expected, rtol=1e-5, atol=1e-7)


def check_training_is_that_of_fully_shard() -> None:
    mesh, model = flat_mesh(), Stack()
    expected = copy.deepcopy(model)
    simple_fsdp(model, mesh)
    for module in (*expected.layers, expected):
        fully_shard(module, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, expected)]
    for ids in batches(10, 2):
        losses = [loss_of(m, ids[dist.get_rank()]) for m in (model, expected)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), whole(theirs), rtol=1e-6, atol=1e-6)


def check_names_and_reads() -> None:
    plain, model = Stack(tied=True), Stack(tied=True)
    names, keys, text = [n for n, _ in plain.named_parameters()], list(plain.state_dict()), repr(plain)
    simple_fsdp(model, flat_mesh())
    assert [n for n, _ in model.named_parameters()] == names and list(model.state_dict()) == keys and repr(model) == text
    assert isinstance(model.layers[0], Block) and type(model.layers[0]) is type(model.layers[1])
    seen = []
    model.output.register_forward_hook(lambda module, inputs, output: seen.append(module.weight))
    model(batches(1, 2)[0, 0])
    assert not isinstance(seen[0], DTensor) and seen[0].shape == (11, 7)
    assert model.output.weight is model.output._parameters["weight"]
    with pytest.raises(RuntimeError):
        raise_inside(model)
    assert isinstance(model.output.weight, DTensor)
    simple_fsdp(model, flat_mesh())  # a second time: nothing left to do
    assert [n for n, _ in model.named_parameters()] == names
    refused = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.tensor(1.0)]))
    with pytest.raises(ValueError, match=r"1\.0: got a scalar"):
        simple_fsdp(refused, flat_mesh())
    assert type(refused[0]) is nn.Linear and not isinstance(refused[0].weight, DTensor)  # nothing was done


def raise_inside(model: nn.Module) -> None:
    handle = model.output.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError()))
    try:
        model(batches(1, 2)[0, 0])
    finally:
        handle.remove()


def check_a_tied_weight_stays_one() -> None:
    alone, mesh = Stack(tied=True), flat_mesh()
    model = copy.deepcopy(alone)
    simple_fsdp(model, mesh)
    assert model.output.weight is model.embedding.weight
    assert_trains_alike(model, alone, mesh)


def check_meta_parameters_become_shards() -> None:
    values = Stack(tied=True)
    with torch.device("meta"):
        model = Stack(tied=True)
    mesh, rank = flat_mesh(), dist.get_rank()
    simple_fsdp(model, mesh)
    model.to_empty(device="cpu")
    assert model.output.weight is model.embedding.weight
    model.tie()
    assert model.embedding.weight.to_local().shape == ((6, 7), (5, 7))[rank]
    for parameter, source in zip(model.parameters(), values.parameters(), strict=True):
        local = parameter.to_local()  # type: ignore[attr-defined]
        assert local.device.type == "cpu" and local.untyped_storage().nbytes() == local.numel() * 4
        with torch.no_grad():
            parameter.copy_(distribute_tensor(source.detach(), mesh, [Shard(0)]))
    assert_trains_alike(model, values, mesh, steps=2)


def check_fewer_rows_than_ranks() -> None:
    alone, mesh = nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 1), nn.Linear(1, 11)), flat_mesh()
    model = copy.deepcopy(alone)
    simple_fsdp(model, mesh)
    assert model[1].bias.to_local().shape == ((1,), (0,))[dist.get_rank()]
    assert_trains_alike(model, alone, mesh)


def check_mixed_precision() -> None:
    model = Stack()
    simple_fsdp(model, flat_mesh(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with Collectives() as collectives:
        loss_of(model, batches(1, 2)[0, dist.get_rank()]).backward()
    assert set(collectives.calls) == {("all_gather_into_tensor", torch.bfloat16), ("reduce_scatter_tensor", torch.float32)}
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None and parameter.grad.dtype == torch.float32


def check_gradients_accumulate() -> None:
    alone, mesh = Stack(), flat_mesh()
    model = copy.deepcopy(alone)
    simple_fsdp(model, mesh)
    for ids in batches(3, 2):
        loss_of(model, ids[dist.get_rank()]).backward()
        (sum(loss_of(alone, part) for part in ids) / 2).backward()  # type: ignore[union-attr]
    assert_same_gradients(model, alone, rtol=1e-5, atol=1e-6)


def check_weights_are_gathered_again_for_the_backward_pass() -> None:
    # Ten parameters. The backward pass needs neither the embedding's nor the two biases.
    for reshard, checkpointing, kept, again in (
        (True, False, 0, 7),
        (False, False, 7, 0),
        (True, True, 0, 9),
        (False, True, 1, 8),
    ):
        model = Stack()
        simple_fsdp(model, flat_mesh(), reshard_after_forward=reshard)
        model.checkpointing = checkpointing
        with Collectives() as forward:
            loss = loss_of(model, batches(1, 2)[0, dist.get_rank()])
        alive = forward.alive(kept)
        with Collectives() as backward:
            loss.backward()
        counts = forward.count("all_gather_into_tensor"), alive, backward.count("all_gather_into_tensor")
        assert counts == (10, kept, again), (reshard, checkpointing, counts)
        assert backward.count("reduce_scatter_tensor") == 10


class InPieces(nn.Linear):
    """Saves its weight three times for the backward pass, as a loss does that is computed a few tokens at a time."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return torch.cat([F.linear(piece, weight, self.bias) for piece in x.chunk(3)])


def check_a_weight_saved_often_is_gathered_again_once() -> None:
    alone, mesh = nn.Sequential(nn.Embedding(11, 4), InPieces(4, 11)), flat_mesh()
    model, ids = copy.deepcopy(alone), batches(1, 2)[0]
    simple_fsdp(model, mesh)
    loss = loss_of(model, ids[dist.get_rank()])
    for _ in range(2):  # a graph that is kept is walked a second time
        with Collectives() as backward:
            loss.backward(retain_graph=True)
        assert backward.count("all_gather_into_tensor") == 1
        assert backward.alive(0) == 0
        (sum(loss_of(alone, part) for part in ids) / 2).backward()  # type: ignore[union-attr]
    assert_same_gradients(model, alone, rtol=1e-5, atol=1e-6)


def check_an_earlier_call_is_respected() -> None:
    alone, mesh = Stack(), flat_mesh()
    model = copy.deepcopy(alone)
    simple_fsdp(model.output, mesh, reshard_after_forward=False)
    simple_fsdp(model, mesh)
    with Collectives() as forward:
        loss = loss_of(model, batches(1, 2)[0, 0])
    assert forward.alive(1) == 1
    loss.backward()
    model.zero_grad()
    assert_trains_alike(model, alone, mesh, steps=2)


def check_state_dicts() -> None:
    source, model, mesh = Stack(), Stack(), flat_mesh()
    simple_fsdp(source, mesh)
    simple_fsdp(model, mesh)
    for assign in (False, True):
        with torch.no_grad():
            source.output.weight.add_(1.0)
        model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
        assert all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), source.parameters(), strict=True))
        loss_of(model, batches(1, 2)[0, 0]).backward()
    twin = copy.deepcopy(model)
    ids = batches(1, 2)[0, 0]
    assert torch.equal(twin(ids), model(ids)) and twin.output.weight is not model.output.weight


def check_activation_checkpointing() -> None:
    for reshard in (True, False):
        alone, mesh = Stack(), flat_mesh()
        model = copy.deepcopy(alone)
        model.checkpointing = True
        simple_fsdp(model, mesh, reshard_after_forward=reshard)
        assert_trains_alike(model, alone, mesh, steps=3)


def check_a_change_in_place_is_noticed() -> None:
    for change_weights in (True, False):
        model = Stack()
        simple_fsdp(model, flat_mesh())
        hidden = []
        model.output.register_forward_pre_hook(lambda module, inputs, kept=hidden: kept.append(inputs[0]))
        loss = loss_of(model, batches(1, 2)[0, 0])
        with torch.no_grad():
            (model.output.weight if change_weights else hidden[0]).mul_(2.0)
        with pytest.raises(RuntimeError, match="in place"):
            loss.backward()


class Gate(nn.Linear):
    """Its gradient needs its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


def check_an_output_that_is_saved_can_be_freed() -> None:
    model = Gate(4, 4)
    simple_fsdp(model, flat_mesh())
    for backward in (False, True):
        output = model(torch.ones(2, 4))
        storage = StorageWeakRef(output.untyped_storage())
        if backward:
            output.sum().backward()
        del output
        assert storage.expired(), backward
    output = model(torch.ones(2, 4))
    with torch.no_grad():
        output.mul_(2.0)
    with pytest.raises(RuntimeError, match="in place"):
        output.sum().backward()


def check_weights_that_are_also_kept_elsewhere() -> None:
    alone = nn.LSTM(4, 4)
    model, mesh = copy.deepcopy(alone), flat_mesh()
    simple_fsdp(model, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for _ in range(2):  # the second step must not read the weights of the first
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            m(torch.ones(3, 2, 4))[0].square().sum().backward()
            optimizer.step()
        assert_same_gradients(model, alone, rtol=1e-5, atol=1e-7)


def check_without_gradients() -> None:
    alone, ids = Stack(), batches(1, 2)[0, 0]
    model = copy.deepcopy(alone)
    simple_fsdp(model, flat_mesh(), param_dtype=None)
    model.embedding.weight.requires_grad_(False)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), alone(ids))
    loss_of(model, ids).backward()
    assert model.embedding.weight.grad is None and model.output.weight.grad is not None


# --- two ranks, compiled --------------------------------------------------------------------------------------------------


def compiled(model: Stack, region: str, backend: Any) -> Stack:
    for module in model.layers if region == "block" else [model]:
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=True, dynamic=False)
    return model


def check_compiled_training_is_that_of_one_process() -> None:
    for backend, region, num_layers in (
        ("aot_eager", "block", 3),
        ("aot_eager", "model", 2),
        ("inductor", "model", 1),
    ):
        torch._dynamo.reset()
        alone, mesh = Stack(tied=True, num_layers=num_layers), flat_mesh()
        model = copy.deepcopy(alone)
        counted = CompileCounterWithBackend(backend)
        simple_fsdp(compiled(model, region, counted), mesh)
        assert_trains_alike(model, alone, mesh, steps=2)
        assert counted.frame_count == 1, (backend, region)


def check_compiled_graphs_gather_again() -> None:
    for reshard, checkpointing, again in ((True, False, 4), (False, False, 0), (True, True, 5), (False, True, 4)):
        torch._dynamo.reset()
        counts = []

        def count(graph, inputs, counts=counts):
            names = [str(node.target) for node in graph.graph.nodes]
            counts.append([sum(name in node for node in names) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")])
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
        model = compiled(Stack(num_layers=1), "model", backend)  # six parameters
        model.checkpointing = checkpointing
        simple_fsdp(model, flat_mesh(), reshard_after_forward=reshard)
        loss_of(model, batches(1, 2)[0, dist.get_rank()]).backward()
        assert counts == [[6, 0], [again, 6]], (reshard, checkpointing, counts)


def check_a_compiled_module_with_weights_of_its_own() -> None:
    for in_place in (False, True):
        alone, mesh = Stack(num_layers=1), flat_mesh()
        model = copy.deepcopy(alone)
        for module in (model.layers[0].up, model.output):
            if in_place:
                module.compile(backend="aot_eager", fullgraph=True, dynamic=False)
            else:
                module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        simple_fsdp(model, mesh)
        assert_trains_alike(model, alone, mesh, steps=2)


def check_compiled_mixed_precision() -> None:
    plain, ids = Stack(), batches(1, 2)[0, dist.get_rank()]
    models = [copy.deepcopy(plain), compiled(copy.deepcopy(plain), "model", "aot_eager")]
    for model in models:
        simple_fsdp(model, flat_mesh(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        loss_of(model, ids).backward()
    assert_same_gradients(models[1], models[0], rtol=1e-6, atol=1e-7)


def check_compiled_qwen3() -> None:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        models.append(Qwen3(dataclasses.replace(FLAVORS["tiny_tied"], num_layers=1)))
        initialise(models[-1].initialisation(), seed=0)
    model, alone = models
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    simple_fsdp(model, flat_mesh())
    for m in models:
        m(tokens[:, :-1], labels_BT=tokens[:, 1:]).backward()
    assert_same_gradients(model, alone, rtol=1e-4, atol=1e-5)


# --- four ranks -----------------------------------------------------------------------------------------------------------


def check_hybrid() -> None:
    alone, mesh = Stack(tied=True), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = copy.deepcopy(alone)
    simple_fsdp(model, mesh)
    weight = model.output.weight
    assert isinstance(weight, DTensor) and weight.placements == (Replicate(), Shard(0))
    assert_trains_alike(model, alone, mesh)


def check_uneven_over_four() -> None:
    alone, mesh = Stack(vocabulary=9, dim=5), flat_mesh()  # nine rows: 3, 3, 3, 0
    model = copy.deepcopy(alone)
    simple_fsdp(model, mesh)
    assert_trains_alike(model, alone, mesh, steps=4)


def check_hybrid_splits_as_fully_shard() -> None:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), Stack()
    assert_splits_as_fully_shard(model, mesh)


def assert_splits_as_fully_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    expected = copy.deepcopy(model)
    simple_fsdp(model, mesh)
    fully_shard(expected, mesh=mesh)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(ours, DTensor) and isinstance(theirs, DTensor)
        assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh), name
        assert torch.equal(ours.to_local(), theirs.to_local()), name


def tensor_parallel(tied: bool = False, hybrid: bool = False, **sizes: int) -> tuple[Stack, Stack, DeviceMesh]:
    """Return a model split over two ranks with the sequence split between its blocks, the same alone, and the other axes."""
    shape, names = ((2, 1, 2), ("dp_replicate", "dp_shard")) if hybrid else ((2, 2), ("dp_shard",))
    root = init_device_mesh("cpu", shape, mesh_dim_names=(*names, "tp"))
    alone = Stack(tied=tied, **({"dim": 6, "hidden": 8, "vocabulary": 12} | sizes))
    model = copy.deepcopy(alone)
    rows = Shard(0)
    parallelize_module(model.embedding, root["tp"], RowwiseParallel(input_layouts=Replicate(), output_layouts=rows))
    parallelize_module(model.output, root["tp"], ColwiseParallel(input_layouts=rows, output_layouts=Replicate()))
    model.tie()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    for block in model.layers:
        parallelize_module(block, root["tp"], plan)
    return model, alone, root[names]


def check_tensor_parallel() -> None:
    for tied in (False, True):
        model, alone, mesh = tensor_parallel(tied=tied)
        simple_fsdp(model, mesh)
        for name, placements in {
            "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
            "down.weight": (Shard(0), Shard(1)),
            "norm.weight": (Shard(0), Replicate()),
        }.items():
            parameter = model.layers[0].get_parameter(name)
            assert isinstance(parameter, DTensor) and parameter.placements == placements, name
            assert torch.equal(whole(parameter), alone.layers[0].get_parameter(name)), name
        assert_trains_alike(model, alone, mesh, steps=4)


def check_hybrid_tensor_parallel() -> None:
    model, alone, mesh = tensor_parallel(hybrid=True)
    simple_fsdp(model, mesh)
    placements = Replicate(), _StridedShard(0, split_factor=2), Shard(0)
    assert model.layers[0].up.weight.placements == placements
    assert_trains_alike(model, alone, mesh, steps=3)


def check_tensor_parallel_splits_as_fully_shard() -> None:
    for sizes in ({}, {"hidden": 10, "dim": 7, "vocabulary": 13}):
        model, _, mesh = tensor_parallel(**sizes)
        assert_splits_as_fully_shard(model, mesh)
    model, _, mesh = tensor_parallel(hybrid=True)
    assert_splits_as_fully_shard(model, mesh)


def check_tensor_parallel_gathers_again() -> None:
    model, _, mesh = tensor_parallel()
    expected = copy.deepcopy(model)
    for m, reshard in ((model, True), (expected, False)):
        simple_fsdp(m, mesh, reshard_after_forward=reshard)
        with Collectives() as forward:
            loss = loss_of(m, batches(1, 2)[0, dist.get_rank() // 2])
        alive = forward.alive(3 if reshard else 10)
        with Collectives() as backward:
            loss.backward()
        # Three are not weights: the inputs that ColwiseParallel gathers forward, and gradients on their way back.
        counts = alive, backward.count("all_gather_into_tensor")
        assert counts == ((3, 10) if reshard else (10, 3)), (reshard, counts)
    assert_same_gradients(model, expected, rtol=1e-6, atol=1e-7)


def check_compiled_tensor_parallel() -> None:
    model, alone, mesh = tensor_parallel(num_layers=1)
    simple_fsdp(compiled(model, "model", "aot_eager"), mesh)
    assert_trains_alike(model, alone, mesh, steps=2)


# --- the tests ------------------------------------------------------------------------------------------------------------

FOUR_RANKS = (
    "check_hybrid",
    "check_hybrid_splits_as_fully_shard",
    "check_uneven_over_four",
    "check_tensor_parallel",
    "check_hybrid_tensor_parallel",
    "check_tensor_parallel_splits_as_fully_shard",
    "check_tensor_parallel_gathers_again",
    "check_compiled_tensor_parallel",
)
CHECKS = {name: 4 if name in FOUR_RANKS else 2 for name in list(globals()) if name.startswith("check_")}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", (2, 4))
def test_sharded_training(world_size: int):
    call(_run_checks, world_size, [name for name, ranks in CHECKS.items() if ranks == world_size], timeout=300)
