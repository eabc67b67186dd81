"""Fully sharded data parallel without hooks: every read of a weight gathers it, so that a traced graph holds the collectives.

While a module runs, its weights are whole; outside of a forward pass they are the shards, as with torch's fully_shard. Each
read is one all-gather, and its gradient one reduce-scatter, so a module reads a weight once and keeps it in a variable.
nn.LSTM and its kind read weights often and keep what they read: right, but gathered several times and whole from then on.

Source of the idea: SimpleFSDP, arXiv:2411.00284.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint


def simple_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Split every parameter by rows over the data-parallel ranks, in place; names and state_dict keys stay.

    Parameters may be on the meta device; otherwise each rank brings the same values. Submodules that an earlier call has
    sharded stay as they are, and what is tied stays tied within a call. Gradients are averaged over the mesh and end as shards
    of the parameter's own type. Slices and placements are those of fully_shard.

    Args:
        mesh: one axis, the ranks to shard over; or two, copies and shards. Parameters that already are split over another axis
            of the same root mesh (tensor parallel) are split further, and read as they were before.
        param_dtype: what weights are cast to before they are gathered. None: their own type.
        reduce_dtype: what gradients are cast to before they are reduced. None: the type they come in.
        reshard_after_forward: gather a weight again for the backward pass instead of keeping it. In eager mode saved-tensor
            hooks do so, which step aside for those of activation checkpointing, since that gathers again anyway; in a compiled
            graph the gather is marked for recomputation.

    Raises:
        ValueError: if the mesh has more axes, or a parameter has no rows.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh: got {mesh.ndim} axes, allowed: 1 (shards) or 2 (copies, shards)")
    groups = [mesh.get_group(axis).group_name for axis in range(mesh.ndim)]
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(f"{name}: got a scalar, allowed: parameters with rows to split; make it [1]")
    sharded: dict[Tensor, tuple[nn.Parameter, _Layout]] = {}  # a tied parameter is met in several modules
    for owner in module.modules():
        if isinstance(owner, _Sharded):
            continue
        layouts = {}
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in sharded:
                layout = _Layout(
                    shard_group=groups[-1],
                    shards=mesh.size(-1),
                    copy_group=groups[0] if mesh.ndim == 2 else None,
                    ranks=mesh.size(),
                    rows=_local(parameter).shape[0],
                    param_dtype=param_dtype,
                    reduce_dtype=reduce_dtype,
                    reshard=reshard_after_forward,
                    inner=(parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None,
                )
                sharded[parameter] = _shard(parameter, mesh, layout), layout
            owner._parameters[name], layouts[name] = sharded[parameter]
        owner.__class__ = _sharded_class(type(owner), tuple(layouts.items()))


@dataclass(frozen=True)
class _Layout:
    """How one parameter is split. Equal for parameters that are alike, so that alike blocks share a class and a graph."""

    shard_group: str
    shards: int
    copy_group: str | None
    ranks: int
    """Shards x copies: what gradients are averaged over."""
    rows: int
    """Of the whole weight, or of this rank's tensor-parallel part of it."""
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard: bool
    inner: tuple[DeviceMesh, tuple[Placement, ...]] | None
    """Mesh and placements of the weight as it is read. None: a plain tensor."""

    @property
    def rows_per_shard(self) -> int:
        """Rows of every shard but the last ones, which may have fewer or none."""
        return -(-self.rows // self.shards)


def _shard(parameter: Tensor, mesh: DeviceMesh, layout: _Layout) -> nn.Parameter:
    first = min(layout.rows, layout.rows_per_shard * mesh.get_local_rank(mesh.ndim - 1))
    rows = min(layout.rows_per_shard, layout.rows - first)
    # A copy: a view would keep the whole parameter's memory.
    shard = _local(parameter.detach()).narrow(0, first, rows).clone(memory_format=torch.contiguous_format)
    placements: tuple[Placement, ...] = (Shard(0),)
    if layout.inner is not None:
        inner_mesh, inner = layout.inner
        cuts = math.prod(inner_mesh.size(axis) for axis, placement in enumerate(inner) if placement.is_shard(0))
        if cuts > 1:  # tensor parallel has cut the rows first, although its axis is the last of the joint mesh
            placements = (_StridedShard(0, split_factor=cuts),)
        placements, mesh = (*placements, *inner), DeviceMesh._concatenate([mesh, inner_mesh])  # nothing public joins axes
    placements = (Replicate(),) * (mesh.ndim - len(placements)) + placements
    shape, stride = parameter.shape, parameter.contiguous().stride()
    whole = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


# --- reading a weight -----------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """What runs on this thread in eager mode."""

    calls = 0
    """Sharded modules that are being called, one inside the other."""
    reads: dict[int, tuple[Tensor, _Read]] | None = None
    """Weights read since the innermost of them was called, by storage: they are not to be saved for the backward pass."""
    pack: Callable[[Tensor], Any] | None = None


_thread = _Thread()
_collectives = torch.ops._c10d_functional  # what traced graphs hold; torch.distributed's own cannot be traced as functions


class _Sharded:
    """Marks the classes made below."""


@cache
def _sharded_class(base: type[nn.Module], layouts: tuple[tuple[str, _Layout], ...]) -> type[nn.Module]:
    """Return a subclass whose weights are properties: nn.Module keeps the shards under the same names, out of sight."""
    reshard = any(layout.reshard for _, layout in layouts)

    def call(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return base.__call__(self, *args, **kwargs)
        _thread.calls += 1
        try:
            # _compiled_call_impl is what nn.Module.compile() leaves: then the compiler decides what is saved.
            forget = reshard and self._compiled_call_impl is None and torch.is_grad_enabled() and not _hooks_of_others()
            with _weights_are_not_saved() if forget else nullcontext():
                return base.__call__(self, *args, **kwargs)
        finally:
            _thread.calls -= 1

    # The same name: messages, printed models and whoever asks for a block's kind do not see a difference.
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__call__": call}
    return type(base.__name__, (base, _Sharded), body | {name: _property(name, layout) for name, layout in layouts})


def _property(name: str, layout: _Layout) -> property:
    def read(self) -> Tensor:
        parameter = self._parameters[name]
        if torch.compiler.is_compiling():
            return _gathered(parameter, layout)
        if not _thread.calls:
            return parameter
        weight = _gathered(parameter, layout)
        if layout.reshard and _thread.reads is not None:
            _thread.reads[_storage(weight)] = weight, _Read(parameter, layout)
        return weight

    return property(read)


def _gathered(parameter: DTensor, layout: _Layout) -> Tensor:
    shard = parameter.to_local()
    if layout.reshard and torch.compiler.is_compiling():
        # Marks the gather for recomputation, whatever the compiler: AOTAutograd's partitioner saves what collectives return.
        weight = checkpoint(_Gather.apply, shard, layout, use_reentrant=False, preserve_rng_state=False)
    else:
        weight = _Gather.apply(shard, layout)
    if layout.inner is None:
        return weight
    mesh, placements = layout.inner
    return DTensor.from_local(weight, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


class _Gather(torch.autograd.Function):
    """From a rank's shard to the whole weight; from every rank's gradient of the whole to a shard of their average."""

    @staticmethod
    def forward(ctx, shard: Tensor, layout: _Layout) -> Tensor:
        ctx.layout, ctx.shard_rows, ctx.dtype = layout, shard.shape[0], shard.dtype
        padded = _with_rows(shard.to(layout.param_dtype or shard.dtype), layout.rows_per_shard)
        whole = _collectives.all_gather_into_tensor(padded, layout.shards, layout.shard_group)
        return _collectives.wait_tensor(whole)[: layout.rows]

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), layout = grads, ctx.layout
        grad = _with_rows(grad.to(layout.reduce_dtype or grad.dtype), layout.rows_per_shard * layout.shards).contiguous()
        shard = _collectives.wait_tensor(_collectives.reduce_scatter_tensor(grad, "sum", layout.shards, layout.shard_group))
        if layout.copy_group is not None:
            shard = _collectives.wait_tensor(_collectives.all_reduce(shard, "sum", layout.copy_group))
        # Divided here and not by the collective: gloo cannot average.
        return (shard[: ctx.shard_rows] / layout.ranks).to(ctx.dtype), None


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


# --- what eager mode saves for the backward pass --------------------------------------------------------------------------


def _hooks_of_others() -> bool:
    """Whether saved tensors go to hooks that are not ours: only the innermost are asked, so ours would starve them."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]  # no public way to ask
    return top is not None and top[0] is not _thread.pack


@contextmanager
def _weights_are_not_saved():
    """Let autograd save the shard of each weight that is read inside; what it asks for back is gathered again.

    Like autograd by itself, refuses a tensor that was changed in place meanwhile, for a weight its shard.
    """
    outer = _thread.reads, _thread.pack
    reads = dict(outer[0] or {})

    def pack(tensor: Tensor) -> tuple[Tensor, int, Callable[[], Tensor] | None]:
        _, read = reads.get(_storage(tensor), (None, None))
        if read is None:
            return tensor.detach(), tensor._version, None  # an operator's own output would hold on to itself
        return read.parameter, read.parameter._version, read.save(tensor)

    _thread.reads, _thread.pack = reads, pack
    try:
        with saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _thread.reads, _thread.pack = outer
        reads.clear()  # autograd holds on to the hooks, and they to the weights


def _unpack(saved: tuple[Tensor, int, Callable[[], Tensor] | None]) -> Tensor:
    tensor, version, regather = saved
    if tensor._version != version:
        raise RuntimeError("a tensor that the backward pass needs was changed in place after the forward pass")
    return tensor if regather is None else regather()


class _Read:
    """One read of a weight, which several operators may have saved: gathered again when the first of them asks."""

    def __init__(self, parameter: DTensor, layout: _Layout):
        self.parameter, self.layout = parameter, layout
        self.saved = self.asked = 0
        self.again: Tensor | None = None

    def save(self, view: Tensor) -> Callable[[], Tensor]:
        """Return what makes the same view of the whole weight, such as its transpose. Keeps no gathered tensor."""
        self.saved += 1
        local = _local(view)
        shape = local.size(), local.stride(), local.storage_offset()
        placed = (view.device_mesh, view.placements, view.size(), view.stride()) if isinstance(view, DTensor) else None

        def regather() -> Tensor:
            with torch.no_grad():
                local = self._gather_once().as_strided(*shape)
                if placed is None:
                    return local
                mesh, placements, size, stride = placed
                return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)

        return regather

    def _gather_once(self) -> Tensor:
        again = _Gather.apply(_local(self.parameter), self.layout) if self.again is None else self.again
        self.asked = (self.asked + 1) % self.saved
        self.again = again if self.asked else None  # whoever asks last lets it go
        return again


def _local(tensor: Tensor) -> Tensor:
    # DTensor.to_local() makes a new view, whose autograd history and version are not wanted here.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata
