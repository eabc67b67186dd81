"""What a recipe compiles in its first step, and what in it will be slow or wrong: graphs, eager operators, findings."""

from __future__ import annotations

import hashlib
import linecache
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import callback as dynamo_callbacks
from torch._dynamo.utils import counters, get_compilation_metrics, set_compilation_metrics_limit
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from preflight.graphs import Graph, Recorder, is_ours, place
from preflight.rehearsal import ShowOperators, group_names
from preflight.stage import staged
from recipes.base import Recipe
from training.distributed import Ranks


@dataclass(frozen=True)
class Finding:
    """Something in the step that costs time on a device that compiles, or does not work there."""

    kind: str
    """graph break, host sync, data-dependent shape, dynamic shape, rank constant, 64-bit, or strided slice."""
    where: str | None
    """File, line and source."""
    text: str
    count: int = 1


@dataclass
class Inventory:
    """What one rank's first optimizer step compiles, and its first validation."""

    graphs: list[Graph] = field(default_factory=list)
    """Each graph that a compiler is asked for, in order."""
    operators: dict[str, int] = field(default_factory=dict)
    """Eager operators by types, shapes and scalar arguments, with how often each runs."""
    findings: list[Finding] = field(default_factory=list)
    places: dict[str, str | None] = field(default_factory=dict)
    """The line of the project that first runs each eager operator; None in the backward pass, and within torch."""

    @property
    def distinct(self) -> dict[str, Graph]:
        """The graphs by fingerprint: what a cache that had nothing has to compile."""
        return {graph.fingerprint: graph for graph in reversed(self.graphs)}


_KEPT_COMPILATIONS = 100_000


def take_inventory(recipe: Recipe, ranks: Ranks, seq_lens: tuple[int | None, ...] = (None,)) -> Inventory:
    """Rehearse the first step of a recipe in its own mode, and list what it compiles.

    Args:
        seq_lens: lengths of the samples of further micro-batches, one after the other. None: the recipe's.
    """
    inventory, operators, findings = Inventory(), Counter[str](), Counter[tuple[str, str | None, str]]()
    groups = group_names(ranks)
    recorder = Recorder(groups)
    keywords = None
    if recipe.run.mode == "compile":
        torch._dynamo.reset()
        counters.clear()
        # Breaks are listed, all of them, rather than refused one by one.
        keywords = {"backend": recorder, "dynamic": False, "fullgraph": False}
    set_compilation_metrics_limit(_KEPT_COMPILATIONS)
    seen_metrics = len(get_compilation_metrics())

    def show(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        if operator.namespace in ("prim", "profiler"):
            return
        if operator.namespace == "aten" and arguments and on_host(arguments[0]):
            return
        if not operator.is_view:  # a view computes nothing
            name = signature(operator, arguments, named, groups)
            operators[name] += 1
            if name not in inventory.places:
                inventory.places[name] = _caller()
        for kind, text in hazards(operator, arguments, named):
            findings[kind, _caller(), text] += 1

    step_counts = set[int]()
    """AdamW's counts of its steps, which stay on the host."""

    def on_host(value: Any) -> bool:
        tensors = value if isinstance(value, (list, tuple)) else [value]
        return all(isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in step_counts for tensor in tensors)

    watcher = ShowOperators(show)

    def mute(muted: Any) -> None:
        watcher.muted = muted

    recorder.while_running = mute
    start, end = (lambda _: mute(True)), (lambda _: mute(False))
    dynamo_callbacks.on_compile_start(start)
    dynamo_callbacks.on_compile_end(end)
    try:
        with staged(recipe, ranks, compile_keywords=keywords) as stage, watcher:
            steps = (state["step"] for state in stage.optimizer.state.values())
            step_counts |= {step.untyped_storage()._cdata for step in steps}
            for seq_len in seq_lens * min(2, recipe.accumulation_steps(ranks.world.size)):
                stage.backward(stage.forward(stage.batch(seq_len)))
            stage.clip()
            stage.update()
            if recipe.validation.every_steps:
                stage.validate()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        kind = "host sync" if isinstance(error, DataDependentOutputException) else "data-dependent shape"
        findings[kind, _origin(error), f"{error.func} needs the value of a tensor; the rehearsal ends here"] += 1
    finally:
        dynamo_callbacks.callback_handler.remove_start_callback(start)
        dynamo_callbacks.callback_handler.remove_end_callback(end)
    inventory.operators = dict(operators)
    inventory.graphs = _explained(recorder.graphs, seen_metrics)
    for graph_break in recorder.breaks:
        findings["graph break", graph_break.where, graph_break.reason.splitlines()[0]] += 1
    located = {graph_break.reason for graph_break in recorder.breaks}
    for reason, count in counters["graph_break"].items() if keywords else ():
        if reason not in located:  # nothing was left to compile, so that no graph came with the reason
            findings["graph break", None, reason.splitlines()[0]] += count
    for function, number in _compilations(inventory.graphs).items():
        if number > 1:
            text = f"{function} is compiled {number} times: a shape or a constant changes between calls"
            findings["dynamic shape", None, text] += 1
    for graph in recorder.graphs:
        for line in graph.lines:
            for kind, text in _hazards_of(line.text):
                findings[kind, line.where, text] += 1
    inventory.findings = [Finding(*key, count) for key, count in findings.items()]
    return inventory


def _explained(graphs: list[Graph], seen_metrics: int) -> list[Graph]:
    """Add to each graph what Dynamo says of its compilation."""
    said = {entry.compile_id: entry for entry in get_compilation_metrics()[seen_metrics:] if entry.co_name}
    result = []
    for graph in graphs:
        entry = said.get(graph.compile_id)
        if entry is None:
            result.append(graph)
            continue
        function = f"{entry.co_name} ({place(entry.co_filename or '', entry.co_firstlineno or 0, '').partition(' `')[0]})"
        cause = entry.recompile_reason or "first call"
        result.append(replace(graph, function=function, cause=cause))
    return result


def _compilations(graphs: list[Graph]) -> dict[str, int]:
    """Return how often each function was compiled."""
    return Counter(function for function, _ in {(graph.function, graph.compile_id) for graph in graphs})


def signature(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any], groups: dict[str, str]) -> str:
    """Return an eager operator with types, shapes and scalar arguments: what a device compiles on its first use.

    The value of a floating-point scalar is left out: a learning rate is another one in each step.
    """
    parts = [_shown(argument, groups) for argument in arguments]
    parts += [f"{name}={_shown(value, groups)}" for name, value in sorted(named.items())]
    text = ", ".join(parts)
    if len(text) > 200:  # an optimizer takes hundreds of tensors at once
        tensors = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((arguments, named)))
        text = f"{tensors} tensors, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{operator}({text})"


def _shown(value: Any, groups: dict[str, str]) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_shown(item, groups) for item in value)}]"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, str):
        return groups.get(value, value)
    if value is None or isinstance(value, (bool, int, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    return type(value).__name__


_SYNCS = ("aten._local_scalar_dense", "aten.item", "aten.equal", "aten.is_nonzero")
_DATA_DEPENDENT = ("aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive")
_64_BIT = ("int64", "float64")


def hazards(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is wrong with one eager operator, as kind and sentence."""
    stride = arguments[4] if len(arguments) > 4 else 1
    tensors = [] if operator.is_view or operator.namespace == "c10d" else tree_leaves((arguments, named))
    types = {str(leaf.dtype).removeprefix("torch.") for leaf in tensors if isinstance(leaf, Tensor)}
    return _judge(str(operator.overloadpacket), str(stride), [dtype for dtype in _64_BIT if dtype in types])


def _hazards_of(line: str) -> list[tuple[str, str]]:
    """Return what is wrong with one node of a graph."""
    operator, _, rest = line.partition(" = ")[2].partition("(")
    arguments = rest.rpartition("): ")[0].split(", ")
    stride = arguments[4] if len(arguments) > 4 else "1"
    return _judge(operator.rsplit(".", 1)[0], stride, [dtype for dtype in _64_BIT if f": {dtype}[" in line])


def _judge(name: str, stride: str, wide: list[str]) -> list[tuple[str, str]]:
    """Return what is wrong with an operator.

    Args:
        stride: its fifth argument, which is a slice's step.
        wide: types of 64 bits among its tensors.
    """
    found = []
    if name in _SYNCS:
        found.append(("host sync", f"{name} waits for the device"))
    if name in _DATA_DEPENDENT:
        found.append(("data-dependent shape", f"{name} has a result whose shape depends on values"))
    if name == "aten.slice" and stride != "1":
        found.append(("strided slice", f"every {stride}th element; split or reshape instead"))
    return found + [("64-bit", f"{dtype} tensors") for dtype in wide]


def _caller() -> str | None:
    """Return the innermost line of the project that runs now."""
    frame = sys._getframe(2)
    while frame is not None:
        if is_ours(frame.f_code.co_filename):
            path = frame.f_code.co_filename
            return place(path, frame.f_lineno, linecache.getline(path, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _origin(error: BaseException) -> str | None:
    """Return the innermost line of the project that an error went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(frame.filename)]
    return place(frames[-1].filename, frames[-1].lineno or 0, frames[-1].line) if frames else None
