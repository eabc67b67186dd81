"""What a recipe compiles: the graphs that torch.compile would hand to a device's compiler, found without one.

A graph's fingerprint covers operators, shapes, types, constants and collectives. It does not depend on names, addresses, the
numbers of process groups, the device, or which rank or run it is: a change of one of those compiles nothing again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext
from torch.fx import GraphModule, Node

from training.snapshot import FOLDERS

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Line:
    """One node of a graph."""

    text: str
    """Operator, arguments and result; earlier nodes by their position."""
    where: str | None = None
    """File, line and source of the model that it comes from."""


@dataclass(frozen=True)
class Graph:
    """One graph that a compiler gets."""

    compile_id: str
    """Dynamo's number of the compilation: which function, and the how-manieth of it."""
    direction: str
    lines: tuple[Line, ...]
    function: str = ""
    """Name and place of the function that is compiled."""
    cause: str = ""
    """Why Dynamo compiled it."""

    @property
    def fingerprint(self) -> str:
        """The same for two graphs exactly if they are the same program."""
        text = "\n".join(line.text for line in self.lines)
        return hashlib.sha256(f"{self.direction}\n{text}".encode()).hexdigest()[:16]

    @property
    def operators(self) -> int:
        """Number of nodes that compute or send something."""
        return sum(not line.text.startswith(("input ", "output ")) for line in self.lines)


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo had to stop and go on eagerly."""

    reason: str
    where: str | None


class Recorder:
    """A compile backend that keeps each graph, and runs it by returning tensors of the right shapes.

    Args:
        groups: what each process group is called, by torch's name for it.
    """

    def __init__(self, groups: dict[str, str]):
        self.groups = groups
        self.graphs: list[Graph] = []
        self.breaks: list[GraphBreak] = []
        self.while_running: Callable[[bool], None] = lambda running: None
        """Told when a graph begins and ends to run: what happens within is not eager."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take one graph from Dynamo, as torch.compile's `backend`."""
        reason = getattr(graph, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            frames = [frame for frame in reason.user_stack if is_ours(frame.filename)]
            where = place(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else None
            self.breaks.append(GraphBreak(reason.reason, where))
        compile_id = str(CompileContext.current_compile_id())
        return aot_autograd(fw_compiler=self._keeping(FORWARD, compile_id), bw_compiler=self._keeping(BACKWARD, compile_id))(
            graph, inputs
        )

    def _keeping(self, direction: str, compile_id: str) -> Callable[..., Any]:
        def keep(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.graphs.append(Graph(compile_id, direction, canonical(graph, self.groups)))
            (output,) = (node for node in graph.graph.nodes if node.op == "output")
            position = {node: index for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
            results = [_result(node, position) for node in output.args[0]]

            def run(arguments: list[Any]) -> list[Any]:
                self.while_running(True)
                try:
                    values = [result(arguments) for result in results]
                    arguments.clear()
                    return values
                finally:
                    self.while_running(False)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return keep


def _result(node: Any, position: dict[Node, int]) -> Callable[[list[Any]], Any]:
    """Return what makes one output of a graph from its inputs, in shape and type."""
    if node in position:
        index = position[node]
        return lambda arguments: arguments[index]
    value = node.meta["val"] if isinstance(node, Node) else node
    if not isinstance(value, Tensor):
        return lambda arguments: value
    shape, stride, dtype = tuple(value.shape), value.stride(), value.dtype
    return lambda arguments: torch.empty_strided(shape, stride, dtype=dtype)


# --- the canonical form ---------------------------------------------------------------------------------------------------


_DATA = (Tensor, int, float, torch.SymInt, torch.SymFloat)


def canonical(graph: GraphModule, groups: dict[str, str]) -> tuple[Line, ...]:
    """Return a graph as lines that do not depend on names, addresses, the device or the run."""
    names: dict[Node, str] = {}
    lines = []
    for node in graph.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), _DATA):
            names[node] = type(node.meta.get("val")).__name__  # a mesh, say: Dynamo passes it along, nothing computes with it
            continue
        names[node] = f"%{len(lines)}"
        if node.op == "placeholder":
            text = f"input {names[node]}: {_type(node.meta.get('val'))}"
        elif node.op == "output":
            # Where an input is no tensor, its gradient is None.
            text = f"output {_argument([value for value in node.args[0] if value is not None], names, groups)}"
        elif node.op == "get_attr":
            text = f"{names[node]} = constant {_constant(_attribute(graph, node.target), groups)}"
        else:
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
            known = groups if "c10d" in target else {}
            arguments = [_argument(argument, names, known) for argument in node.args]
            arguments += [f"{key}={_argument(value, names, known)}" for key, value in sorted(node.kwargs.items())]
            text = f"{names[node]} = {target}({', '.join(arguments)}): {_type(node.meta.get('val'))}"
        lines.append(Line(text, _where(node.meta.get("stack_trace"))))
    return tuple(lines)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return type(value).__name__


def _argument(value: Any, names: dict[Node, str], groups: dict[str, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item, names, groups) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(item, names, groups)}" for key, item in sorted(value.items())) + "}"
    if isinstance(value, slice):
        return f"slice({_argument([value.start, value.stop, value.step], names, groups)})"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, str):
        return groups.get(value, value)
    if value is None or isinstance(value, (bool, int, float, complex, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    return type(value).__name__  # its repr may hold an address


def _constant(value: Any, groups: dict[str, str]) -> str:
    if isinstance(value, GraphModule):
        return "; ".join(line.text for line in canonical(value, groups))
    if not isinstance(value, Tensor):
        return type(value).__name__
    try:
        content = hashlib.sha256(repr(value.detach().cpu().tolist()).encode()).hexdigest()[:16]
    except Exception:  # a fake tensor has no content
        content = "unknown content"
    return f"{_type(value)} {content}"


def _attribute(graph: GraphModule, target: str) -> Any:
    value: Any = graph
    for name in target.split("."):
        value = getattr(value, name)
    return value


# --- places in the source -------------------------------------------------------------------------------------------------

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def _where(stack_trace: str | None) -> str | None:
    """Return the innermost line of the project in a node's stack."""
    frames = [frame for frame in _FRAME.findall(stack_trace or "") if is_ours(frame[0])]
    return place(*frames[-1]) if frames else None


def is_ours(path: str) -> bool:
    """Whether a file is of this project and takes part in a step."""
    return path.startswith(_OURS)


def place(path: str, line: int | str, source: str | None) -> str:
    """Return a place as people write it: file, line and what stands there."""
    return f"{path.removeprefix(_ROOT)}:{line} `{(source or '').strip()}`"


_ROOT = f"{Path(__file__).parent.parent}/"
_OURS = tuple(f"{_ROOT}{folder}/" for folder in FOLDERS)
