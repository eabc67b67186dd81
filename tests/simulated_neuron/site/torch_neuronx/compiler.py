"""The Dynamo backend `neuron`: AOTAutograd, a look into the cache for each graph, and then the graph as it is."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from torch_neuronx import neff_cache
from torch_neuronx.device import extension


@dataclasses.dataclass
class NeuronCompilationMetrics:
    """One graph; times in microseconds."""

    graph_id: str
    graph_name: str
    model_name: str
    has_collectives: bool
    graph_node_count: int
    timestamp: float
    torch_neuronx_fx_passes_us: int
    torch_neuronx_lower_us: int
    torch_neuronx_compile_us: int


METRICS: list[NeuronCompilationMetrics] = []


def neuron_backend(
    graph: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
):
    """Compile one graph that Dynamo has captured.

    Raises:
        RuntimeError: for shapes that are not fixed, for inputs on the host, and if the compiler fails.
    """
    if any(isinstance(value, torch.SymInt) or _is_dynamic(value) for value in inputs):
        raise RuntimeError("[NCC_EMOD025] Dynamic shape is not supported; compile with dynamic=False")
    if options is not None:
        options["model_name"] = "model"  # the real backend writes into the options that it gets, too
    return aot_autograd(fw_compiler=_compiler("fwd"), bw_compiler=_compiler("bwd"))(graph, inputs)


def _is_dynamic(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _compiler(direction: str) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        text = text_of(graph, inputs)
        key, seconds = neff_cache.fetch_graph(text)
        METRICS.append(
            NeuronCompilationMetrics(
                graph_id=key,
                graph_name=f"graph_{len(METRICS)}_{direction}",
                model_name="model",
                has_collectives="_c10d_functional" in text,
                graph_node_count=len(graph.graph.nodes),
                timestamp=time.time(),
                torch_neuronx_fx_passes_us=0,
                torch_neuronx_lower_us=0,
                torch_neuronx_compile_us=int(seconds * 1e6),
            )
        )
        return make_boxed_func(_as_one(graph.forward))

    return compile_graph


def _as_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a graph's operators without compiling them one by one: the graph as a whole is compiled."""
    native = extension()

    def run(*inputs: Any) -> Any:
        native.enter_graph()
        try:
            return forward(*inputs)
        finally:
            native.leave_graph()

    return run


def text_of(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return what is compiled: operators, constants, and the types of the inputs.

    Left out are which ranks are in a process group and the index of the device: ranks with other partners and another core run
    the same program. A rank's number among the graph's constants stays, and so does how many are in the group.
    """
    code = re.sub(r"type='neuron', index=\d+", "type='neuron'", graph.graph.python_code("self").src)
    code = "\n".join(
        re.sub(r"'(\w+)'\)", _group_size, line) if "_c10d_functional" in line else line for line in code.splitlines()
    )
    types = [
        (tuple(value.shape), tuple(value.stride()), str(value.dtype)) for value in inputs if isinstance(value, torch.Tensor)
    ]
    return f"{code}\n{types}"


def _group_size(name: re.Match[str]) -> str:
    return f"group of {torch.distributed.distributed_c10d._resolve_process_group(name[1]).size()})"
