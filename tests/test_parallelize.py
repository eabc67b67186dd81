"""Activation checkpointing and compilation change neither names nor results, and alike blocks share one graph."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from models.qwen3.config import FLAVORS
from models.qwen3.model import Block, Qwen3
from models.qwen3.parallelize import parallelize, saving_policy
from training.initialise import initialise

LAYOUTS = [(checkpointing, region) for checkpointing in ("none", "selective", "full") for region in (None, "block", "model")]
TOKENS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def build(num_layers: int = 2, tied: bool = False) -> Qwen3:
    model = Qwen3(dataclasses.replace(FLAVORS["tiny_tied" if tied else "tiny"], num_layers=num_layers))
    initialise(model.initialisation(), seed=0)
    return model


def lay_out(model: Qwen3, checkpointing: Any, region: Any, backend: str = "eager") -> Qwen3:
    kwargs = {"backend": backend, "dynamic": False, "fullgraph": True}
    parallelize(model, activation_checkpointing=checkpointing, compile_region=region, compile_kwargs=kwargs)
    return model


def loss_and_gradients(model: Qwen3) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(TOKENS[:, :-1], labels_BT=TOKENS[:, 1:])
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("checkpointing", "region"), LAYOUTS)
def test_names_do_not_change(checkpointing: str, region: str | None):
    plain, laid_out = build(), lay_out(build(), checkpointing, region)
    assert list(laid_out.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in laid_out.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in laid_out.named_modules()] == [name for name, _ in plain.named_modules()]


@pytest.mark.parametrize(("checkpointing", "region"), LAYOUTS)
def test_gradients_do_not_change(checkpointing: str, region: str | None):
    loss, gradients = loss_and_gradients(build())
    other_loss, other_gradients = loss_and_gradients(lay_out(build(), checkpointing, region))
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


def test_gradients_do_not_change_through_aot_autograd():
    loss, gradients = loss_and_gradients(build())
    other_loss, other_gradients = loss_and_gradients(lay_out(build(), "full", "block", "aot_eager"))
    assert torch.allclose(loss, other_loss, rtol=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - other_gradients[name]).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("num_layers", [2, 12])
def test_alike_blocks_share_one_graph(num_layers: int, checkpointing: str):
    loss_and_gradients(lay_out(build(num_layers), checkpointing, "block"))  # 12: past dynamo's limit of recompilations
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_whole_model_is_one_graph(checkpointing: str):
    loss_and_gradients(lay_out(build(), checkpointing, "model"))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_one_compiled_function_serves_every_block(monkeypatch: pytest.MonkeyPatch):
    """Dynamo shares a graph only between calls with equal options, and TorchNeuron writes into the dict that it gets."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function, options: calls.append((function, options)) or function)
    options = {"max_autotune": False}
    parallelize(build(3), compile_region="block", compile_kwargs={"options": options})
    assert calls == [(Block.forward, options)] and calls[0][1] is options


@pytest.mark.parametrize("product", [torch.ops.aten.mm.default, torch.ops.aten.linear.default])
def test_selective_checkpointing_keeps_every_second_product(product: torch._ops.OpOverload):
    """As mm or as linear: TorchNeuron does not take a linear apart."""
    decide = saving_policy()
    for is_recompute in (False, True):
        context = SimpleNamespace(is_recompute=is_recompute)
        kept = [decide(context, product) == CheckpointPolicy.MUST_SAVE for _ in range(7)]
        assert kept == [True, False, True, False, True, False, True]
        assert decide(context, torch.ops.aten.add.Tensor) == CheckpointPolicy.PREFER_RECOMPUTE
        assert decide(context, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) == CheckpointPolicy.MUST_SAVE


def test_selective_checkpointing_computes_attention_once():
    """Counted by the operator itself: three products of seven and attention are not computed again."""
    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[str(function)] += 1
            return function(*args, **(kwargs or {}))

    calls = {}
    for checkpointing in ("none", "selective", "full"):
        counts.clear()
        with Count():
            loss_and_gradients(lay_out(build(4), checkpointing, None))
        calls[checkpointing] = counts["aten.mm.default"], counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    products, attention = calls["none"]
    assert calls["selective"] == (products + 4 * 3, attention)
    assert calls["full"] == (products + 4 * 6, 2 * attention)  # the last product of a block is not needed again


def test_checkpointing_keeps_fewer_activations_and_recomputes():
    def saved_bytes(model: Qwen3) -> int:
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(TOKENS, labels_BT=TOKENS)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        loss.backward()
        return sum(size for pointer, size in saved.items() if pointer not in weights)

    calls = []
    model = lay_out(build(4), "full", None)
    for block in model.layers:
        block.feed_forward.register_forward_pre_hook(lambda *_: calls.append(1))
    assert saved_bytes(model) < saved_bytes(build(4)) / 4
    assert len(calls) == 8  # four blocks, forward and again in the backward pass


@pytest.mark.parametrize(("checkpointing", "region"), [("full", None), ("selective", "block")])
def test_a_copy_computes_with_its_own_weights(checkpointing: str, region: str | None):
    model = lay_out(build(), checkpointing, region)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.layers.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(twin(TOKENS), model(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_layout_on_the_meta_device_survives_materialise(tied: bool):
    with torch.device("meta"):
        model = Qwen3(FLAVORS["tiny_tied" if tied else "tiny"])
    lay_out(model, "full", "block")
    model.materialise(torch.device("cpu"))
    initialise(model.initialisation(), seed=0)
    loss, gradients = loss_and_gradients(model)
    expected_loss, expected = loss_and_gradients(build(tied=tied))
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_d9_tied_model_trains_under_fully_shard(tmp_path):
    """Torch 2.13 refuses one parameter in two FSDP groups; embedding and output projection stay together in the root's."""
    expected, _ = loss_and_gradients(build(tied=True))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = lay_out(build(tied=True), "full", None)
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss, _ = loss_and_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert model.output.weight is model.tok_embeddings.weight
        assert losses[0] == pytest.approx(expected.item(), rel=1e-5)
        assert losses[2] < losses[1] < losses[0]
    finally:
        dist.destroy_process_group()
