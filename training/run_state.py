"""The whole state of a run as named tensors: parameters, optimizer, and the random numbers of every rank.

The tensors are the run's own: a checkpoint is written from where they are and read into the same place, each rank its part.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.tensor import DTensor, Replicate

from backends.base import Backend
from training.checkpoint_files import CheckedReader
from training.checkpoint_store import CheckpointError, CheckpointStore, Manifest

# Neither is a mistake: one process needs no process group, and what a crash left half written is written again.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
warnings.filterwarnings("ignore", "Detected an existing checkpoint", UserWarning)


class RunState:
    """State of one rank.

    Args:
        group: of gloo, in which all ranks load and save. None: one process.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, backend: Backend, group: dist.ProcessGroup | None = None
    ):
        self.model, self.optimizer, self.backend, self.group = model, optimizer, backend, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, as this rank holds it."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, values in self.optimizer.state.items():
            state |= {f"optimizer.{names[parameter]}.{key}": value for key, value in values.items()}
        return state | self._random()

    def bytes_to_write(self) -> int:
        """Of this rank: what several ranks hold is written by one of them."""
        return sum(_own_bytes(tensor, self.rank) for tensor in self.tensors().values())

    def load(self, store: CheckpointStore, manifest: Manifest, notify: Callable[[str], None]) -> None:
        """Read a checkpoint into model, optimizer and generators. All ranks must call it.

        Raises:
            CheckpointError: naming the key or the file that is missing or does not fit.
        """
        prepare(self.optimizer)
        state = self.tensors()
        same_ranks = manifest.world_size == self.world_size
        if not same_ranks:
            state = {name: tensor for name, tensor in state.items() if not name.startswith("random.")}
            notify(
                f"resharded from {manifest.world_size} ranks to {self.world_size}: parameters and optimizer state exactly; "
                "random numbers begin again from run.seed"
            )
        reader = CheckedReader(store, manifest.step)
        try:
            read_state(state, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{store.name(manifest.step)} cannot be loaded: {in_one_line(error)}") from None
        if same_ranks:
            self._set_random(state)

    def _random(self) -> dict[str, Tensor]:
        """States of this rank's generators."""
        own = f"random.rank{self.rank}"
        _, words, gauss = random.getstate()
        state = {
            f"{own}.cpu": torch.get_rng_state(),
            f"{own}.python": torch.tensor(words, dtype=torch.int64),
            f"{own}.python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        }
        # A device whose module does not give its state away has none to go on from.
        if (ask := getattr(self._device_module(), "get_rng_state", None)) is not None:
            state[f"{own}.device"] = ask().cpu()
        return state

    def _device_module(self) -> Any:
        return torch.get_device_module(self.backend.name)

    def _set_random(self, state: dict[str, Tensor]) -> None:
        own = f"random.rank{self.rank}"
        gauss = state[f"{own}.python_gauss"].item()
        random.setstate((3, tuple(state[f"{own}.python"].tolist()), None if gauss != gauss else gauss))
        torch.set_rng_state(state[f"{own}.cpu"])
        if f"{own}.device" in state:
            self._device_module().set_rng_state(state[f"{own}.device"])


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW the state that it makes in its first step, so that there is something to read into.

    Source: torch/optim/adamw.py of 2.13, `_init_group`. A test compares the two.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                on_device = group["fused"] or group["capturable"]
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
                    "exp_avg": torch.zeros_like(parameter).detach(),
                    "exp_avg_sq": torch.zeros_like(parameter).detach(),
                }


def in_one_line(error: BaseException) -> str:
    """What went wrong and on which rank, without the traceback that torch adds."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {in_one_line(failure)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _own_bytes(tensor: Tensor, rank: int) -> int:
    if not isinstance(tensor, DTensor):
        return tensor.nbytes if rank == 0 else 0
    copies = 1
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    return tensor.to_local().nbytes // copies
