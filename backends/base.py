"""What the loop and the tools may ask of a device: one abstract base, with honest defaults.

None means unknown and 0 means measured zero. Reports are snapshots, not events: read before, read after, subtract.
Importing this package does not import torch: a backend says what is missing, and sets its environment variables, before
torch is loaded. That is why torch is imported inside the methods.
"""

from __future__ import annotations

import itertools
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from backends.checks import Check
from backends.chip_limits import ChipLimits, limits_of
from backends.peak_flops import Peak, peaks_for
from backends.system import installed_version

if TYPE_CHECKING:
    import torch


LAUNCHER_SET = "FIRSTSTEP_LAUNCHER_SET"
"""Variable in which a script of scripts/ lists the variables that it has set, so that they are not taken for the user's."""


class BackendUnavailable(RuntimeError):
    """The device asked for cannot be used here. The message names what is missing and what to do."""


@dataclass(frozen=True)
class EnvironmentVariable:
    """One environment variable that a backend relies on. A value that the user has set is kept."""

    name: str
    value: str
    reason: str
    set_by: Literal["user", "launcher", "backend"]


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
    """Graphs that were fetched instead of compiled."""
    misses: int | None = None
    """Graphs that were compiled."""

    @classmethod
    def at(cls, directory: Path, suffix: str = "", hits: int | None = None, misses: int | None = None) -> CompileCache:
        """Count the files under `directory` whose name ends in `suffix`. A directory that does not exist holds none."""
        files = size_bytes = 0
        errors: list[OSError] = []
        for folder, _, names in os.walk(directory, onerror=errors.append):
            for name in names:
                if name.endswith(suffix) and not name.startswith("."):
                    try:
                        size_bytes += Path(folder, name).stat().st_size
                    except FileNotFoundError:  # another process has just replaced or evicted it
                        continue
                    files += 1
        if any(not isinstance(error, FileNotFoundError) for error in errors):  # a part of it could not be read
            return cls(str(directory), None, None, hits, misses)
        return cls(str(directory), files, size_bytes, hits, misses)


class Backend(ABC):
    """A device by name. Each member is here because the loop or a tool calls it."""

    name: ClassVar[str]
    compile_backend: ClassVar[str]
    """Name that torch.compile gets unless the recipe names another one."""
    compile_options: ClassVar[dict[str, tuple[Any, ...]]] = {"dynamic": (False,), "fullgraph": (True, False)}
    """Legal values of each torch.compile keyword that the loop passes."""
    compile_packages: ClassVar[tuple[str, ...]] = ("torch",)
    compile_variables: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions, and variables whose values, are part of the compile cache's key."""
    compile_cache_variable: ClassVar[str | None] = None
    """Variable that says where the persistent compile cache is. None: it cannot be moved."""
    compiles_eagerly: ClassVar[bool] = False
    """Whether operators are compiled, and kept in that cache, in eager mode too."""
    process_group: ClassVar[str]
    """Name for torch.distributed.init_process_group."""
    pin_memory: ClassVar[bool] = False
    """Whether host batches are copied from page-locked memory."""
    adamw: ClassVar[tuple[str, ...]] = ("foreach", "loop")
    """AdamW implementations that run on this device, fastest first."""

    # --- before torch is imported -------------------------------------------------------------------------------------

    @abstractmethod
    def require(self) -> None:
        """Return if the device is usable; torch is imported only after everything cheaper has been checked.

        Raises:
            BackendUnavailable: with the missing piece, how to get it, and `--run.device cpu`.
        """

    def check_ranks(self, local_ranks: int, chip: str | None = None) -> None:  # noqa: B027 - most devices have no such rule
        """Return if so many ranks can run on this host, before torch is imported.

        Raises:
            BackendUnavailable: with both numbers.
        """

    def wanted_environment(self) -> tuple[tuple[str, str, str], ...]:
        """(name, value, reason) of each variable that must be set before torch is imported."""
        return ()

    def set_environment(self) -> tuple[EnvironmentVariable, ...]:
        """Set what is wanted and not yet set, and return every variable that was set for the run, with who set it.

        To be called once, before torch is imported: a second call finds the variables set and cannot tell by whom.
        """
        by_launcher = os.environ.get(LAUNCHER_SET, "").split()
        result = []
        for name, value, reason in self.wanted_environment():
            set_by: Literal["user", "launcher", "backend"] = "backend"
            if name in os.environ:
                set_by = "launcher" if name in by_launcher else "user"
            result.append(EnvironmentVariable(name, os.environ.setdefault(name, value), reason, set_by))
        known, reason = {variable.name for variable in result}, "the launcher's --dry-run says why"
        return (
            *result,
            *(
                EnvironmentVariable(name, os.environ[name], reason, "launcher")
                for name in by_launcher
                if name in os.environ and name not in known
            ),
        )

    # --- the device ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def device(self, local_rank: int = 0) -> torch.device:
        """The device that this rank computes on; `synchronize` and `memory` then speak about it."""

    def seed(self, seed: int) -> None:
        """Seed Python's generator and torch's, on the host and on the device. Numpy is not touched."""
        import torch

        random.seed(seed)
        torch.manual_seed(seed)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work handed to the device is done."""

    def memory(self) -> Memory:
        """Device memory now; each field None where the device does not say."""
        return Memory()

    def reset_peak_memory(self) -> None:  # noqa: B027 - most devices have nothing to do here
        """Start a new peak, where the device can."""

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
                names = ", ".join(self.compile_options)
                raise ValueError(
                    f"torch.compile keyword {option!r} is not legal on {self.name}; allowed: {names}; leave it out"
                )
            # `is`: 1 == True, but torch.compile is not meant to get 1.
            if not any(value is legal for legal in allowed):
                values = ", ".join(map(repr, allowed))
                raise ValueError(f"torch.compile {option}: got {value!r} on {self.name}, allowed: {values}")

    def compile_kwargs(self) -> dict[str, Any]:
        """Further keywords for every torch.compile call that uses this device's own compile backend.

        The values are the same objects at each call: a compile backend may write into them.
        """
        return {}

    def compile_settings(self) -> dict[str, str | None]:
        """Return what a compile cache's key holds besides the graph: versions and variables. None: absent, or not set."""
        versions = {f"version of {package}": installed_version(package) for package in self.compile_packages}
        return {**versions, **{name: os.environ.get(name) for name in self.compile_variables}}

    def compile_cache(self) -> CompileCache:
        """The persistent compile cache now. Walks its folder, which may hold thousands of files."""
        return CompileCache()

    def compile_cache_counters(self) -> tuple[int | None, int | None]:
        """Hits and misses of `compile_cache` alone, without a look at its folder."""
        return None, None

    def compiled_graphs(self) -> list[str] | None:
        """Cache key of each graph that this process compiled or fetched, in order. None: the device does not say."""
        return None

    def fallback_ops(self) -> dict[str, int | None] | None:
        """Operators that ran on the host instead of the device, with counts where known. None: the device cannot tell."""
        return None

    def machine_checks(self, local_ranks: int, chip: str | None, instance: str | None = None) -> list[Check]:
        """Look at what this device's runtime asks of a machine, beyond being there.

        Args:
            local_ranks: that are to run on this machine.
            instance: another machine, by its type. None: this one.
        """
        return []

    # --- measuring ----------------------------------------------------------------------------------------------------

    def chip(self) -> str | None:
        """Name of the chip: as the peak table spells it, or as the device does if it is not listed. None: not reported."""
        return None

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        """Peak FLOP/s of one rank's share for matrix products in `dtype`, the usual convention first. Empty: unknown.

        Args:
            dtype: float32 or bfloat16: the type that the matrix products run in.
            chip: name from the peak table. None: what the device reports.
        """
        return [peak for peak in peaks_for(chip or self.chip(), dtype) if peak.per == "device"]

    def peak_flops(self, dtype: str, chip: str | None = None) -> Peak | None:
        """The first of `peaks`. None: the chip or its peak is unknown, so there is no MFU."""
        return next(iter(self.peaks(dtype, chip)), None)

    def limits(self, chip: str | None = None) -> ChipLimits | None:
        """Memory and bandwidth of one rank's share of the chip. None: unknown.

        Args:
            chip: name from the peak table. None: what the device reports.
        """
        return limits_of(chip or self.chip())

    def profile_arguments(self, directory: Path) -> dict[str, Any]:
        """Keywords for torch.profiler.profile that make it write its traces into `directory`."""
        from torch.profiler import ProfilerActivity

        return {
            "activities": [ProfilerActivity.CPU],
            "on_trace_ready": lambda profile: profile.export_chrome_trace(str(directory / "trace.json")),
        }

    @contextmanager
    def profiler(self, output_dir: Path) -> Iterator[list[Path]]:
        """Profile the body; the list holds the written files once the body has ended without an error.

        Args:
            output_dir: gets one new folder for each rank and use, so that nothing is overwritten.
        """
        import torch.distributed as dist
        from torch.profiler import profile

        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        folders = (output_dir / f"rank{rank}-{number}" for number in itertools.count())
        directory = next(folder for folder in folders if not folder.exists())
        directory.mkdir(parents=True)
        files: list[Path] = []
        with profile(**self.profile_arguments(directory)):
            yield files
            self.synchronize()  # work still in flight would be missing from the trace
        files.extend(sorted(path for path in directory.rglob("*") if path.is_file()))

    def describe(self) -> dict[str, Any]:
        """Facts about the device and its software for the record, ready for JSON. Unknown is None."""
        import torch

        return {"chip": self.chip(), "torch": str(torch.__version__)}
