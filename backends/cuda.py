"""NVIDIA GPUs. The only file that says torch.cuda."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import inductor
from backends.base import Backend, BackendUnavailable, CompileCache, Memory
from backends.peak_flops import Peak, table_name
from backends.system import read_text

if TYPE_CHECKING:
    import torch


class CudaBackend(Backend):
    """One GPU for each rank."""

    name = "cuda"
    compile_backend = "inductor"
    compile_cache_variable = inductor.CACHE_VARIABLE
    compile_packages = ("torch", "triton")
    process_group = "nccl"
    pin_memory = True
    adamw = ("fused", "foreach", "loop")

    driver_version_file: Path = Path("/proc/driver/nvidia/version")

    def require(self) -> None:
        """Return if this torch was built for CUDA, the driver is loaded and a GPU is visible."""
        try:
            import torch
        except ImportError as error:
            raise _unavailable(
                f"torch does not import ({error})", "install a CUDA build of torch: https://pytorch.org"
            ) from error
        if torch.version.cuda is None:
            raise _unavailable(f"torch {torch.__version__} is not a CUDA build", "install one: https://pytorch.org/get-started")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            if not self.driver_version_file.exists():
                raise _unavailable(
                    f"no NVIDIA driver is loaded ({reason})", "install it; `nvidia-smi` must list a GPU"
                ) from error
            raise _unavailable(
                f"the driver is there but gives no GPU ({reason})", "see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            ) from error
        if torch.cuda.device_count() == 0:
            raise _unavailable("no GPU is visible", "see `nvidia-smi` and CUDA_VISIBLE_DEVICES")

    def device(self, local_rank: int = 0) -> torch.device:
        """The GPU of this rank, made the current one. A launcher that shows each rank one GPU calls it index 0.

        Raises:
            BackendUnavailable: if fewer GPUs are visible than this rank needs.
        """
        import torch

        visible = torch.cuda.device_count()
        index = 0 if visible == 1 else local_rank
        if index >= visible:
            raise _unavailable(
                f"local rank {local_rank} has no GPU of its own: {visible} visible",
                f"start at most {visible} ranks on this host",
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def seed(self, seed: int) -> None:
        import torch

        super().seed(seed)
        torch.cuda.manual_seed_all(seed)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def memory(self) -> Memory:
        """What torch's caching allocator holds on the current GPU; other processes and the CUDA context are not in it."""
        import torch

        return Memory(
            allocated_bytes=torch.cuda.memory_allocated(),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.memory_reserved(),
            total_bytes=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        )

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def compile_cache(self) -> CompileCache:
        return inductor.compile_cache()

    def compile_cache_counters(self) -> tuple[int, int]:
        return inductor.hits_and_misses()

    def fallback_ops(self) -> dict[str, int | None] | None:
        """None fell back: an operator without a CUDA kernel raises."""
        return {}

    def chip(self) -> str | None:
        """Asked of the current GPU itself, so other GPUs in the machine do not matter."""
        import torch

        reported = torch.cuda.get_device_name()
        return table_name(reported) or reported or None

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        """As in the table. With TF32 switched on there is no float32 peak: the products would not run in float32."""
        import torch

        if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return []
        return super().peaks(dtype, chip)

    def profile_arguments(self, directory: Path) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity

        return super().profile_arguments(directory) | {"activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}

    def describe(self) -> dict[str, Any]:
        import torch

        return {
            **super().describe(),
            "device_name": torch.cuda.get_device_name(),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "devices": torch.cuda.device_count(),
            "driver": self._driver_version(),
            "cuda": torch.version.cuda,
        }

    def _driver_version(self) -> str | None:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", read_text(self.driver_version_file) or "")
        return found.group(1) if found else None


def _unavailable(missing: str, fix: str) -> BackendUnavailable:
    return BackendUnavailable(f"device 'cuda' is not usable here: {missing}; {fix}; or use --run.device cpu")
