"""What the stand-in does and refuses, checked in a process of its own: `python -m tests.simulated_neuron.checks NAME`."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(Exception, match=message):
        call()


def strictness() -> None:
    """What a plain CPU fallback would hide."""
    device = torch.device("neuron")
    assert torch.accelerator.current_accelerator() == torch.device("neuron")
    x, host = torch.randn(4, 4, device=device), torch.randn(4, 4)
    one_device = "xpected all (operands on one|tensors to be on the same) device"
    refused(one_device, lambda: x + host)
    refused(one_device, lambda: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)))
    refused(one_device, lambda: F.embedding(torch.zeros(4, dtype=torch.int64), x))
    refused(one_device, lambda: torch.cat([x, host]))
    refused(one_device, lambda: torch.where(host > 0, x, x))
    refused("does not exist: this host has 4 logical cores", lambda: torch.ones(2, device="neuron:7"))
    refused("neuron:0 and neuron:1", lambda: x + torch.ones(4, 4, device="neuron:1"))
    refused("KeyError: 'neuron'", lambda: torch.compile(nn.Linear(4, 4).to(device))(x))
    with pytest.raises(Exception, match="Dynamic shape is not supported"):
        torch.compile(nn.Linear(4, 4).to(device), backend="neuron", dynamic=True)(torch.ones(3, 4, device=device))
    refused("expected a generator of device neuron", lambda: x.normal_(generator=torch.Generator()))
    refused(
        "only the contiguous memory format", lambda: torch.empty(1, 2, 3, 4, device=device, memory_format=torch.channels_last)
    )
    assert (x + 1.0).device.type == "neuron" and x[torch.tensor([0, 1])].shape == (2, 4)  # scalars and index lists may mix


def training() -> None:
    """Five steps as on the CPU: checkpointed, compiled, under autocast, saved and loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    inputs = torch.randn(4, 8)

    def losses(model: nn.Module, device: str, forward: Callable) -> list[float]:
        model = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        result = []
        for _ in range(5):
            loss = forward(model, inputs.to(device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    expected = losses(model, "cpu", lambda model, x: model(x))
    compiled = torch.compile(lambda model, x: model(x), backend="neuron", dynamic=False, fullgraph=True)
    recomputed = lambda model, x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    eager = losses(model, "neuron", lambda model, x: model(x))
    assert eager == pytest.approx(expected, rel=1e-5)
    assert losses(model, "neuron", recomputed) == pytest.approx(expected, rel=1e-5)
    assert losses(model, "neuron", compiled) == eager
    executed = importlib.import_module("torch_neuronx").get_executed_ops
    compiled_whole = torch.compile(lambda x: (x.cosh() * 2).tan(), backend="neuron", dynamic=False, fullgraph=True)
    compiled_whole(inputs.to("neuron"))
    assert not {"aten::cosh", "aten::tan"} & set(executed()), "a graph is compiled as a whole"

    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert model.to("neuron")(inputs.to("neuron")).dtype == torch.bfloat16
        assert F.softmax(torch.ones(4, device="neuron", dtype=torch.bfloat16), 0).dtype == torch.float32
    torch.manual_seed(5)
    drawn = torch.randn(4, device="neuron")
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.randn(4, device="neuron"))
    assert torch.neuron.memory_allocated() > 0  # type: ignore[attr-defined]


def collectives() -> None:
    """Two ranks. The process group comes first, and carries nothing of the host's."""
    rank = int(os.environ["RANK"])
    if os.environ.get("TOUCH_FIRST"):
        torch.ones(1, device="neuron")
        refused("already initialised: create the process group before", lambda: dist.init_process_group("neuron"))
        return
    if os.environ.get("BIND_DEVICE"):
        bound = torch.device("neuron", rank)
        refused("device_id=...\\) is not supported", lambda: dist.init_process_group("neuron", device_id=bound))
        return
    dist.init_process_group("neuron")
    x = torch.full((4,), 1.0 + rank, device="neuron")
    assert x.device.index == rank, "one core for each process, by its local rank"
    refused("belongs to another process", lambda: torch.ones(2, device=f"neuron:{1 - rank}"))
    for dtype in (torch.float32, torch.bfloat16):
        total = x.to(dtype, copy=True)
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        assert total.tolist() == [1.5] * 4
    gathered = torch.empty(8, device="neuron")
    dist.all_gather_into_tensor(gathered, x)
    assert gathered.tolist() == [1.0] * 4 + [2.0] * 4
    refused("No backend type associated with device type cpu", lambda: dist.all_reduce(torch.ones(2)))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"strictness": strictness, "training": training, "collectives": collectives}[sys.argv[1]]()
