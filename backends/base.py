"""What the loop and the tools may ask of a device: one abstract base, with honest defaults.

None means unknown and 0 means measured zero. Reports are snapshots, not events: read before, read after, subtract.
Importing this package does not import torch: a backend says what is missing, and sets its environment variables, before
torch is loaded. That is why torch is imported inside the methods.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from backends.peak_flops import Peak, peaks_for

if TYPE_CHECKING:
    import torch


class BackendUnavailable(RuntimeError):
    """The device asked for cannot be used here. The message names what is missing and what to do."""


@dataclass(frozen=True)
class EnvironmentVariable:
    """One environment variable that a backend relies on. A value that the user has set is kept."""

    name: str
    value: str
    reason: str
    set_by: Literal["user", "backend"]


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes at one moment. None: the device does not say."""

    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True)
class CompileCache:
    """The persistent compile cache at one moment. Counters run from the start of the process. None: unknown."""

    directory: str | None = None
    files: int | None = None
    size_bytes: int | None = None
    hits: int | None = None
    misses: int | None = None


class Backend(ABC):
    """A device by name. Each member is here because the loop or a tool calls it."""

    name: ClassVar[str]
    compile_backend: ClassVar[str]
    """Name that torch.compile gets unless the recipe names another one."""
    compile_options: ClassVar[dict[str, tuple[Any, ...]]] = {"dynamic": (False,), "fullgraph": (True, False)}
    """Legal values of each torch.compile keyword that the loop passes."""
    process_group: ClassVar[str]
    """Name for torch.distributed.init_process_group."""
    pin_memory: ClassVar[bool] = False
    """Whether host batches are copied from page-locked memory."""
    adamw: ClassVar[tuple[str, ...]] = ("foreach", "loop")
    """AdamW implementations that run on this device, fastest first."""

    # --- before torch is imported -------------------------------------------------------------------------------------

    @abstractmethod
    def require(self) -> None:
        """Return if the device is usable; may import torch only after everything cheaper has been checked.

        Raises:
            BackendUnavailable: with the missing piece, the command that installs it, and `--run.device cpu`.
        """

    def wanted_environment(self) -> tuple[tuple[str, str, str], ...]:
        """(name, value, reason) of each variable that must be set before torch is imported."""
        return ()

    def set_environment(self) -> tuple[EnvironmentVariable, ...]:
        """Set what is wanted and not yet set, and return every wanted variable with the value in force and who set it."""
        result = []
        for name, value, reason in self.wanted_environment():
            set_by: Literal["user", "backend"] = "user" if name in os.environ else "backend"
            result.append(EnvironmentVariable(name, os.environ.setdefault(name, value), reason, set_by))
        return tuple(result)

    # --- the device ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def device(self, local_rank: int = 0) -> torch.device:
        """The device that this rank computes on."""

    def seed(self, seed: int) -> None:
        """Seed every generator that this process may draw from on the host and the device."""
        import torch

        torch.manual_seed(seed)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work handed to the device is done."""

    def memory(self) -> Memory:
        """Device memory now; every field None where the device does not say."""
        return Memory()

    def reset_peak_memory(self) -> None:
        """Start a new peak, where the device keeps one."""

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Context in which matrix products run in `dtype`; None: no mixed precision."""
        import torch

        return torch.autocast(device_type=self.name, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def check_compile(self, **options: Any) -> None:
        """Refuse torch.compile keywords that this device does not honour.

        Raises:
            ValueError: naming the option, the value got and the values allowed.
        """
        for option, value in options.items():
            allowed = self.compile_options.get(option)
            if allowed is None:
                raise ValueError(f"torch.compile option {option!r} is not legal on {self.name}; allowed: {', '.join(self.compile_options)}")
            if value not in allowed:
                raise ValueError(f"torch.compile {option}: got {value!r} on {self.name}, allowed: {', '.join(map(repr, allowed))}")

    def compile_cache(self) -> CompileCache:
        """The persistent compile cache now."""
        return CompileCache()

    def fallback_ops(self) -> dict[str, int | None] | None:
        """Operators that ran on the host instead of the device, with counts where known. None: the device cannot tell."""
        return None

    # --- measuring ----------------------------------------------------------------------------------------------------

    def chip(self) -> str | None:
        """Accelerator name as the peak table spells it. None: the device does not say."""
        return None

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        """Peak FLOP/s of one device (one rank's share) for matrix products in `dtype`, the usual convention first.

        Args:
            dtype: float32 or bfloat16: the type that the matrix products run in.
            chip: name from the peak table. None: what the device reports.
        """
        return peaks_for(chip or self.chip(), dtype)

    def peak_flops(self, dtype: str, chip: str | None = None) -> Peak | None:
        """The first of `peaks`. None: the chip or its peak is unknown, so there is no MFU."""
        return next(iter(self.peaks(dtype, chip)), None)

    @contextmanager
    def profiler(self, output_dir: Path) -> Iterator[list[Path]]:
        """Profile the body; the list holds the written trace files once the body has ended."""
        raise NotImplementedError  # replaced by the writer of this file's torch.profiler implementation
        yield []

    def describe(self) -> dict[str, Any]:
        """Facts about the device and its software for the record. Unknown is None."""
        return {"chip": self.chip()}
