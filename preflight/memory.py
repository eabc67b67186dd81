"""Which memory one step needs, when, and for what: a log of every allocation, read afterwards.

What a block of memory turned out to be is known only later: a gradient is a temporary until it is found in `parameter.grad`.
So allocations are logged as they come, named at the end, and the peak is looked for when everything has its name.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

PARAMETERS, OPTIMIZER_STATE, GRADIENTS = "parameters", "optimizer state", "gradients"
GATHERED = "gathered weights and communication buffers"
ACTIVATIONS, INPUTS, TEMPORARY = "activations", "inputs and tables", "temporary"
CATEGORIES = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, GATHERED, ACTIVATIONS, INPUTS, TEMPORARY)

_SHARDING_CODE = ("/fsdp/_fully_shard/", "/training/simple_fsdp.py", "/torch/nn/parallel/distributed.py")
"""Files of which one is on the stack when memory is allocated to gather weights or to send gradients."""
_FRAMES = 24
"""How far up the stack they are looked for."""


@dataclass
class Allocation:
    """One block of memory."""

    size: int
    """Bytes now. FSDP frees and refills the same block."""
    phase: str
    category: str | None = None


@dataclass(frozen=True)
class Change:
    """One block was allocated, freed, or resized in place."""

    allocation: Allocation
    bytes: int
    phase: str
    place: str


@dataclass(frozen=True)
class Peak:
    """The fullest moment."""

    total_bytes: int
    by_category: dict[str, int]
    phase: str
    place: str


class MemoryLog:
    """Allocations of one rank, whose tensors may be fake. Whoever runs the step sets `phase` and `place`."""

    def __init__(self) -> None:
        self.phase, self.place = "", ""
        self._allocations: dict[int, Allocation] = {}
        """Those that exist, by the address of torch's storage object."""
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._changes: list[Change] = []
        self._before: list[tuple[Allocation, int]] = []
        """What there was at `begin`, with its size then."""

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Name the memory of these tensors, whether it is logged already or was there before."""
        for tensor in tensors:
            self._of(_local(tensor).untyped_storage()).category = category

    def saw(self, result: Any) -> None:
        """Log what an operator has allocated."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._of(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log that a block was freed or refilled in place, which only FSDP does."""
        allocation = self._of(storage)
        allocation.category = GATHERED
        self._change(allocation, storage.nbytes() - allocation.size)

    def now(self) -> dict[str, int]:
        """Bytes that are allocated now, by category."""
        return _by_category((allocation, allocation.size) for allocation in self._allocations.values())

    def begin(self) -> None:
        """Look for the peak from here on."""
        self._changes = []
        self._before = [(allocation, allocation.size) for allocation in self._allocations.values()]

    def peak(self) -> Peak:
        """Return the fullest moment since `begin`, in which every block goes by the name that it has now."""
        at = Counter(_by_category(self._before))
        total = sum(at.values())
        highest = Peak(total, dict(at), self.phase, self.place)
        for change in self._changes:
            at[_category(change.allocation)] += change.bytes
            total += change.bytes
            if total > highest.total_bytes:
                highest = Peak(total, dict(at), change.phase, change.place)
        return highest

    def peaks(self) -> dict[tuple[str, str], int]:
        """Return the most bytes since `begin` of each phase and place."""
        total, highest = sum(size for _, size in self._before), Counter[tuple[str, str]]()
        for change in self._changes:
            total += change.bytes
            moment = (change.phase, change.place)
            highest[moment] = max(highest[moment], total)
        return dict(highest)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """See FSDP free its gathered weights and fill them again, which it does in place and without an operator."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def _of(self, storage: torch.UntypedStorage) -> Allocation:
        key = storage._cdata
        if (known := self._allocations.get(key)) is not None:
            return known
        allocation = Allocation(0, self.phase, GATHERED if _is_of_sharding() else None)
        self._allocations[key] = allocation
        self._ends[key] = weakref.ref(storage, lambda _: self._freed(key))
        self._change(allocation, storage.nbytes())
        return allocation

    def _freed(self, key: int) -> None:
        allocation = self._allocations.pop(key)
        del self._ends[key]
        self._change(allocation, -allocation.size)

    def _change(self, allocation: Allocation, by: int) -> None:
        if by:
            allocation.size += by
            self._changes.append(Change(allocation, by, self.phase, self.place))


def _by_category(sizes: Iterable[tuple[Allocation, int]]) -> dict[str, int]:
    held: Counter[str] = Counter()
    for allocation, size in sizes:
        held[_category(allocation)] += size
    return {category: held[category] for category in CATEGORIES}


def _category(allocation: Allocation) -> str:
    """What is allocated in the forward pass and is not known by name is kept for the backward pass, or soon free."""
    return allocation.category or (ACTIVATIONS if allocation.phase == "forward" else TEMPORARY)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_of_sharding() -> bool:
    frame = sys._getframe(3)
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if any(code in frame.f_code.co_filename for code in _SHARDING_CODE):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
