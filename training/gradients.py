"""The global gradient norm, and clipping by it, over parameters that are whole, split or copied."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

Layout = tuple[DeviceMesh, tuple[bool, ...]] | None
"""The ranks that hold a gradient and, for each mesh axis, whether it is split there. None: every rank has the whole."""


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm they had, [].

    Each element of the model counts once, however many ranks hold it: the norm is that of one process with the whole model.
    Parameters may lie on different meshes or on none, which torch's own function refuses.

    Args:
        max_norm: inf: only measure.
        norm_type: p of the p-norm; inf for the largest absolute element.
    """
    layouts: dict[Layout, list[Tensor]] = defaultdict(list)
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if isinstance(gradient, DTensor):
            assert not any(placement.is_partial() for placement in gradient.placements), "a gradient is not summed up yet"
            split = tuple(not placement.is_replicate() for placement in gradient.placements)
            layouts[gradient.device_mesh, split].append(gradient.to_local())
        else:
            layouts[None].append(gradient)
    norms = [_over_ranks(_norm(local, norm_type), layout, norm_type) for layout, local in layouts.items()]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if math.isfinite(max_norm):
        # Clamped on the device: asking whether the norm is too large would wait for it.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for local in layouts.values():
            torch._foreach_mul_(local, scale)  # pyright: ignore[reportPrivateImportUsage] - as torch's own clipping does
    return total


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Row by row, and then over the rows: over 10 million elements at once, torch's CPU kernel is off by more than 1e-5."""
    held = [gradient for gradient in gradients if gradient.numel()]  # of a small parameter a rank may hold nothing
    if not held:
        return gradients[0].new_zeros(())
    rows = (torch.linalg.vector_norm(gradient, norm_type, dim=-1) for gradient in held)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(row, norm_type) for row in rows]), norm_type)


def _over_ranks(norm: Tensor, layout: Layout, norm_type: float) -> Tensor:
    """Join the norms of the parts that the ranks hold; an axis that holds copies is left out."""
    if layout is None or not any(layout[1]):
        return norm
    mesh, split = layout
    infinite = math.isinf(norm_type)
    joined = Partial("max" if infinite else "sum")
    placements = [joined if axis_is_split else Replicate() for axis_is_split in split]
    part = norm if infinite else norm**norm_type
    whole = DTensor.from_local(part, mesh, placements, run_check=False).full_tensor()
    return whole if infinite else whole ** (1.0 / norm_type)
