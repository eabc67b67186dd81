"""Which of how many processes this one is, as the launcher says. Torch-free: a wrong launch is refused before torch loads."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from recipes.base import RecipeError
from training.processes import TICKS_PER_SECOND, read_process

_LAUNCHED = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """The processes of one run. One process needs no launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Index among the processes of this host."""
    local_size: int = 1
    """Processes of this host."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Read torchrun's variables; without WORLD_SIZE there is one process.

        Raises:
            RecipeError: if they are incomplete or contradict each other.
        """
        size = _number(environment, "WORLD_SIZE") if "WORLD_SIZE" in environment else 1
        if size == 1:
            return cls()
        missing = [name for name in _LAUNCHED if name not in environment]
        if missing:
            raise RecipeError(
                f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set; "
                f"start the ranks with torchrun --nproc_per_node {size} train.py RECIPE, or unset WORLD_SIZE"
            )
        world = cls(*(_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
        if not (world.rank < size and world.local_rank < world.local_size <= size):
            raise RecipeError(
                f"the launcher's numbers do not fit together: RANK {world.rank} of WORLD_SIZE {size}, LOCAL_RANK "
                f"{world.local_rank} of LOCAL_WORLD_SIZE {world.local_size}; start the ranks with torchrun"
            )
        return world

    @property
    def host_threads(self) -> int:
        """This process's share of the host's cores."""
        return max(1, (os.cpu_count() or 1) // self.local_size)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the record and speaks for all."""
        return self.rank == 0


def launch_id() -> str | None:
    """The launcher's name for this launch, which need not be unique. None: torchrun did not start this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def launcher_began() -> float | None:
    """When the parent of this process was created, in seconds since the epoch. None: the system does not say.

    For a rank that torchrun started that is when the launch began on this host, however often the ranks were started since.
    """
    parent = read_process(os.getppid())
    if parent is None:
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - parent.started / TICKS_PER_SECOND)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal() or (name.endswith("SIZE") and int(value) == 0):
        raise RecipeError(f"{name}: got {value!r}, allowed: a whole number; unset it or start the ranks with torchrun")
    return int(value)
