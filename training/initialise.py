"""Random initial weights that do not depend on the layout: each rank draws its own shards, of the same whole model.

A matrix is cut into blocks of fixed size, and each block has a random stream of its own. So a rank draws the blocks that its
shard touches and no others, and any number of ranks, split in any way, begin with the same weights as one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_ROWS, BLOCK_COLUMNS = 32, 512


@torch.no_grad()
def initialise(initialisation: Iterable[tuple[nn.Parameter, float | None]], seed: int, threads: int = 1) -> None:
    """Fill materialised parameters on any device. Numbers are drawn on the host, so that every device has the same.

    Args:
        initialisation: each parameter with the standard deviation of its normal(0, std); None: all ones.
        threads: of the host; they change the time that it takes, and nothing else.
    """
    first_stream = int.from_bytes(hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=4).digest(), "little")
    with ThreadPoolExecutor(threads) as pool:
        for parameter, std in initialisation:
            local, part = local_part(parameter)
            if std is None:
                local.fill_(1.0)
                continue
            if local.numel():
                local.copy_(draw(parameter.shape, part, first_stream, pool.map).mul_(std))
            rows, columns = (slice(0, size) for size in parameter.shape)
            first_stream += len(_blocks(rows, BLOCK_ROWS)) * len(_blocks(columns, BLOCK_COLUMNS))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what this rank holds of a parameter, and which part of the whole that is, one slice per dimension."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))


def draw(shape: torch.Size, part: tuple[slice, ...], first_stream: int, over: Callable[..., Iterator[None]] = map) -> Tensor:
    """Return part of a matrix of standard normal numbers, fp32 on the host.

    Args:
        shape: of the whole matrix, [rows, columns].
        first_stream: the random stream of its first block; each further block takes the next.
        over: map, or one that works on several rows of blocks at a time.
    """
    rows, columns = part
    result = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
    blocks_in_a_row = len(_blocks(slice(0, shape[1]), BLOCK_COLUMNS))

    def draw_row(top: int) -> None:
        generator = torch.Generator()
        lower, upper = max(rows.start, top), min(rows.stop, top + BLOCK_ROWS)
        for left in _blocks(columns, BLOCK_COLUMNS):
            stream = first_stream + top // BLOCK_ROWS * blocks_in_a_row + left // BLOCK_COLUMNS
            generator.manual_seed(stream % 2**32)  # all that torch's host generator takes of a seed
            block = torch.empty(min(BLOCK_ROWS, shape[0] - top), min(BLOCK_COLUMNS, shape[1] - left))
            block.normal_(generator=generator)
            near, far = max(columns.start, left), min(columns.stop, left + BLOCK_COLUMNS)
            wanted = block[lower - top : upper - top, near - left : far - left]
            result[lower - rows.start : upper - rows.start, near - columns.start : far - columns.start] = wanted

    for _ in over(draw_row, _blocks(rows, BLOCK_ROWS)):
        pass
    return result


def _blocks(part: slice, size: int) -> range:
    """Return where the blocks begin that a part of one dimension touches."""
    return range(part.start // size * size, part.stop, size)
