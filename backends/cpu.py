"""The host's processor: every recipe's logic runs here, at tiny size."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import cpu_peak, inductor
from backends.base import Backend, BackendUnavailable, CompileCache, Memory
from backends.peak_flops import DTYPES, Peak
from backends.system import read_text

if TYPE_CHECKING:
    import torch


class CpuBackend(Backend):
    """All cores of the host together as one device."""

    name = "cpu"
    compile_backend = "inductor"
    compile_cache_variable = inductor.CACHE_VARIABLE
    compile_packages = ("torch", "triton")
    process_group = "gloo"
    adamw = ("fused", "foreach", "loop")

    cpuinfo: Path = Path("/proc/cpuinfo")

    def require(self) -> None:
        """Return if torch is installed; nothing else is needed."""
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise BackendUnavailable(
                f"device 'cpu' needs torch, which does not import here ({error}); install it: pip install torch"
            ) from error

    def device(self, local_rank: int = 0) -> torch.device:
        """The one CPU device; ranks on the same host share it."""
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        """Return at once: work on the CPU is done when the call that started it returns."""

    def memory(self) -> Memory:
        """The memory of the host.

        The peak is the largest resident set of this whole process since it started, interpreter and libraries included: no
        allocator counts tensors on the CPU. It cannot be restarted.
        """
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
        return Memory(peak_allocated_bytes=peak * unit, total_bytes=_host_memory_bytes())

    def compile_cache(self) -> CompileCache:
        return inductor.compile_cache()

    def compile_cache_counters(self) -> tuple[int, int]:
        return inductor.hits_and_misses()

    def fallback_ops(self) -> dict[str, int | None] | None:
        """None fell back: the host is the device."""
        return {}

    def chip(self) -> str | None:
        """Model name of the processor. None: the system does not say (no /proc/cpuinfo, or no model name in it)."""
        return next(iter(self._cpuinfo("model name")), None)

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        """The rate of the fastest matrix product on this machine, measured once and then cached on disk.

        Takes about a second when it measures. A chip other than this one is unknown: its peak cannot be measured here.
        """
        if dtype not in DTYPES or chip not in (None, self.chip()):
            return []
        return [cpu_peak.peak(dtype, self.chip())]

    def describe(self) -> dict[str, Any]:
        import torch

        cores = set(zip(self._cpuinfo("physical id"), self._cpuinfo("core id"), strict=False))
        return {
            **super().describe(),
            "physical_cores": len(cores) or None,
            "logical_cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "simd": torch.backends.cpu.get_cpu_capability(),
            "host_memory_bytes": _host_memory_bytes(),
        }

    def _cpuinfo(self, field: str) -> list[str]:
        """The values of one field, in the order of the logical cores. Empty: the system does not say."""
        lines = (read_text(self.cpuinfo) or "").splitlines()
        return [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == field]


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # the system does not have these names
        return None
