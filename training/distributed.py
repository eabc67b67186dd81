"""All ranks of one run, seen from one of them: how they start, how they are arranged, what they tell each other.

The order is the one that Trainium needs and no other device minds: environment variables, torch, the process group, and only
then the device.

Context parallelism is not offered: torch's own (torch.distributed.tensor.experimental.context_parallel, 2.13) replaces CUDA's
attention kernels only.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]  # documented, yet not in the stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.parallel import loss_parallel

from backends.base import Backend
from recipes.base import Recipe
from training.rank_board import connect
from training.record import RunFailed
from training.timeline import Timeline
from training.watchdog import Watchdog
from training.world import World

T = TypeVar("T")
_NETWORK_FOLDER_SECONDS = 5.0
"""How much later than its maker another machine may see a new folder on a network file system."""


class RanksDisagree(RunFailed):
    """The ranks are not about to do the same work; the message names a field and what each side has."""


class Vote:
    """Numbers that the ranks have told each other."""

    def __init__(self, number: Tensor, work: dist.Work | None):
        self._number, self._work = number, work

    def result(self) -> int:
        """Wait for everybody's number and return the highest."""
        if self._work is not None:
            self._work.wait()
        return int(self._number)


class Ranks:
    """The ranks of one run. One process has no group, and then every method answers for it alone."""

    def __init__(self, recipe: Recipe, world: World):
        self.world = world
        self.tensor = recipe.parallel.tensor_parallel_degree
        self.shards = recipe.shard_degree(world.size)
        self.data = recipe.data_parallel_size(world.size)
        self.replicas = self.data // self.shards
        self.limits = recipe.comm
        self.mesh: DeviceMesh | None = None
        """Axes dp_replicate, dp_shard and tp, of which only those are there that have more than one rank."""
        self._control: dist.ProcessGroup | None = None
        self.checkpoint_group: dist.ProcessGroup | None = None
        """For the thread that saves: it may not share a group with the loop."""
        self.watchdog: Watchdog

    @property
    def data_rank(self) -> int:
        """Which of the data-parallel ranks this is: ranks that share matrices read the same samples."""
        return self.world.rank // self.tensor

    def connect(self, backend: Backend) -> None:
        """Create the process group, before anything touches the device.

        No device_id is passed: it would make groups be split off each other, which not every device's collectives can do.
        A group on the host beside it carries what ranks tell each other; a device's collectives may refuse host tensors.
        """
        if self.world.size == 1:
            return
        timeout = timedelta(seconds=self.limits.first_step_timeout_seconds)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # After an elastic restart the launcher's store may still hold the addresses of the processes that are gone.
        store = PrefixStore(f"firststep/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend.process_group, store=store, rank=rank, world_size=size, timeout=timeout)
        self._control, self.checkpoint_group = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))  # type: ignore

    def watch(self, timeline: Timeline, notify: Callable[[str], None], end: Callable[[BaseException], None]) -> Watchdog:
        """Return the watchdog of this rank, to be entered; the process group must exist.

        Args:
            notify: prints a line.
            end: called if the run has to be ended while the main thread is blocked.
        """
        rank, size = self.world.rank, self.world.size
        board = connect(size) if size > 1 else None
        self.watchdog = Watchdog(timeline, self.limits, notify, end, rank=rank, world_size=size, board=board)
        return self.watchdog

    def arrange(self, backend: Backend) -> None:
        """Lay the ranks out: neighbours share matrices, then shards, then replicas. Touches the device."""
        sizes = {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tensor}
        axes = {name: size for name, size in sizes.items() if size > 1}
        if axes:
            self.mesh = init_device_mesh(backend.name, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def axis(self, *names: str) -> DeviceMesh | None:
        """The part of the mesh with those of the named axes that are there. None: none of them is."""
        there = tuple(name for name in names if self.mesh is not None and name in (self.mesh.mesh_dim_names or ()))
        return self.mesh[there] if self.mesh is not None and there else None

    def shorten_timeout(self, notify: Callable[[str], None]) -> None:
        """Go over to the time-out of steady steps; say so where the device's process group cannot."""
        if self.world.size == 1:
            return
        seconds = self.limits.step_timeout_seconds
        with warnings.catch_warnings(record=True) as refused:
            warnings.simplefilter("always")
            for group in (dist.group.WORLD, *self._groups()):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
        if refused:
            notify(
                f"time-out: this device's collectives keep {self.limits.first_step_timeout_seconds:g} s; the watchdog ends a "
                f"later step of more than {seconds:g} s instead"
            )

    def _groups(self) -> list[dist.ProcessGroup]:
        return [] if self.mesh is None else [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def layout(self, recipe: Recipe) -> dict[str, Any]:
        """How the model lies over the ranks, for the record."""
        return {
            "data_parallel_replicate_degree": self.replicas,
            "data_parallel_shard_degree": self.shards,
            "tensor_parallel_degree": self.tensor,
            "data_parallel_wrapper": recipe.parallel.data_parallel_wrapper if self.data > 1 else None,
            "activation_checkpointing": recipe.parallel.activation_checkpointing,
        }

    # --- what ranks tell each other, over the host ----------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Return everybody's value, by rank, on every rank."""
        values: list[Any] = [value]
        if self._control is not None:
            values = [None] * self.world.size
            dist.all_gather_object(values, value, group=self._control)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """Return what `make` gives on rank 0, on every rank. An exception there is raised everywhere."""
        if self._control is None:
            return make()
        made: list[Any] = [None, None]
        if self.world.is_main:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0, group=self._control)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def require_same(self, facts: dict[str, Any]) -> None:
        """Refuse to go on if ranks are about to do different work: their collectives would wait for each other for ever.

        Raises:
            RanksDisagree: on every rank, naming the first fact that differs, its values and a rank of each.
        """
        everybody = self.gather(facts)
        for name, ours in everybody[0].items():
            for rank, theirs in enumerate(everybody):
                if theirs[name] != ours:
                    raise RanksDisagree(
                        f"the ranks are not about to do the same work: {name} is {ours!r} on rank 0 and {theirs[name]!r} on "
                        f"rank {rank}; start all ranks from the same recipe, code, packages and data"
                    )

    def require_shared(self, folder: Path) -> None:
        """Refuse to go on unless every rank sees the folder that rank 0 has made. All ranks meet here.

        Raises:
            RanksDisagree: on every rank, naming the first one that does not see it.
        """
        self.barrier()  # from here on it is made
        ends = time.monotonic() + _NETWORK_FOLDER_SECONDS
        while not (found := folder.is_dir()) and time.monotonic() < ends:
            time.sleep(0.1)
        for rank, (sees, place) in enumerate(self.gather((found, f"{socket.gethostname()}:{folder.absolute()}"))):
            if not sees:
                raise RanksDisagree(
                    f"run.output_dir: rank 0 has made {folder}, and rank {rank} does not see it (it looks at {place}); choose "
                    "a folder that all machines share, and start all ranks in the same directory"
                )

    def sum_losses(self, losses: Sequence[Tensor]) -> list[float]:
        """Read losses [] from the device, each summed over the data-parallel ranks; waits for all of them.

        They are added on the host: windows have more than one length, and a device compiles for each shape that it meets.
        """
        parts = [loss.item() for loss in losses]
        if self.data == 1 or not parts:
            return parts
        total = torch.tensor(parts, dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        return (total / self.tensor).tolist()

    def vote(self, wish: int) -> Vote:
        """Tell everybody a number; their answers come later, with the vote's result."""
        number = torch.tensor([wish])
        return Vote(number, dist.all_reduce(number, dist.ReduceOp.MAX, group=self._control, async_op=True))

    def contexts(self) -> AbstractContextManager[Any]:
        """What forward and backward passes run in: with tensor parallelism, torch's loss over a split vocabulary."""
        return loss_parallel() if self.tensor > 1 else nullcontext()

    @contextmanager
    def first_on_each_host(self) -> Iterator[None]:
        """Run the body on one rank of each host, then on its others."""
        is_first = self.world.local_rank == 0
        if not is_first:
            self.barrier()
        try:
            yield
        finally:
            if is_first:
                self.barrier()

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        if self._control is not None:
            self.gather(None)
