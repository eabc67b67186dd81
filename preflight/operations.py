"""What one rank computes and sends in a step: FLOPs by its own shapes, and every collective with its group and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_KINDS = {
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
"""How the names of torch's collective operators begin, the longer ones first where one begins like another."""


@dataclass(frozen=True)
class Collective:
    """One kind of message among one group of ranks."""

    kind: str
    group: str
    """Axes of the mesh, or `all ranks`."""


@dataclass(frozen=True)
class Traffic:
    """All messages of one kind among one group of ranks in a step."""

    kind: str
    group: str
    count: int
    bytes: int
    """The larger of what goes in and what comes out of each call: the gathered size, not the bytes on the wire."""


@dataclass
class Operations:
    """Counts of one rank.

    Args:
        groups: name of each process group: what it is called in the mesh.
    """

    groups: dict[str, str]
    flops: Counter[str] = field(default_factory=Counter)
    """By phase. A multiply and an add are two; attention is not halved for causality; recomputation counts."""
    count: Counter[Collective] = field(default_factory=Counter)
    bytes: Counter[Collective] = field(default_factory=Counter)

    def saw(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any, phase: str) -> None:
        """Count one operator."""
        namespace, _, name = function._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._message(name, arguments, keywords, result)
        else:
            self.flops[phase] += _flops(function, arguments, keywords, result)

    def traffic(self) -> list[Traffic]:
        """Return the messages, the most bytes first."""
        found = [Traffic(kind.kind, kind.group, count, self.bytes[kind]) for kind, count in self.count.items()]
        return sorted(found, key=lambda messages: -messages.bytes)

    def snapshot(self) -> tuple[Counter[Any], ...]:
        """Return copies of the counts."""
        return self.flops.copy(), self.count.copy(), self.bytes.copy()

    def repeat(self, before: tuple[Counter[Any], ...], after: tuple[Counter[Any], ...], times: int) -> None:
        """Count what happened between two snapshots so many times more."""
        for counter, start, end in zip((self.flops, self.count, self.bytes), before, after, strict=True):
            for key in end:
                counter[key] += times * (end[key] - start[key])

    def _message(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        kind = next((kind for start, kind in _KINDS.items() if name.lstrip("_").startswith(start)), None)
        if kind is None:
            return  # wait_tensor, barrier
        tensors = [leaf for leaf in tree_leaves((arguments, keywords, result)) if isinstance(leaf, Tensor)]
        collective = Collective(kind, self._group((*arguments, *keywords.values())))
        self.count[collective] += 1
        self.bytes[collective] += max((tensor.nbytes for tensor in tensors), default=0)

    def _group(self, arguments: tuple[Any, ...]) -> str:
        for argument in arguments:
            if isinstance(argument, str) and argument in self.groups:
                return self.groups[argument]
            if isinstance(argument, torch.ScriptObject):
                try:
                    name = torch.distributed.ProcessGroup.unbox(argument).group_name
                except RuntimeError:  # a reduction's kind is such an object too
                    continue
                return self.groups.get(name, name)
        return "unknown"


def _flops(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> int:
    packet = function.overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention(sdpa_flop_count, *arguments[:3])
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention(sdpa_backward_flop_count, *arguments[:4])
    formula = flop_registry.get(packet)
    return 0 if formula is None else formula(*arguments, **keywords, out_val=result)


def _attention(formula: Any, *tensors: Tensor) -> int:
    """Fewer key and value heads are used by several query heads: the products are as many as if each had its own."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    heads = shapes[-3][1] if len(shapes) == 3 else shapes[1][1]
    return formula(*((shape[0], heads, *shape[2:]) for shape in shapes))
