"""AWS Trainium through native TorchNeuron (torch-neuronx 2.13 and 2.14). The only file that says torch.neuron.

Written from AWS's documentation and not yet run on a Trainium chip. What the documentation names is called directly. What it
could not confirm goes through `_ask`, which answers None where a release lacks the function: None then stands in the record.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/index.html
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import neuron_cores
from backends.base import Backend, BackendUnavailable, CompileCache, Memory
from backends.checks import Check
from backends.chip_limits import ChipLimits
from backends.peak_flops import Peak, peaks_for, table_name
from backends.system import installed_version, read_text

if TYPE_CHECKING:
    import torch

# AWS documents the extra index; the rest of the line is put together from its support matrix and not confirmed.
# Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/setup/troubleshooting.html
INSTALL = (
    'pip install torch==2.14.0 "torch-neuronx==2.14.*" neuronx-cc --extra-index-url https://pip.repos.neuron.amazonaws.com'
)

CACHE_VARIABLE, DEFAULT_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache"


class NeuronBackend(Backend):
    """One logical NeuronCore for each rank.

    The process group must exist before anything touches the device: creating it decides which core this process sees.
    """

    name = "neuron"
    compile_backend = "neuron"
    compile_packages = ("torch", "torch-neuronx", "neuronx-cc")
    compile_variables = ("NEURON_CC_FLAGS", "NEURON_COMPILER_OPT_LEVEL")
    compile_cache_variable = CACHE_VARIABLE
    compiles_eagerly = True
    process_group = "neuron"

    oldest_python: tuple[int, int] = (3, 12)
    device_nodes: Path = Path("/dev/neuron*")
    driver_version_file: Path = Path("/sys/module/neuron/version")  # where Linux puts a module's version; not confirmed

    def __init__(self) -> None:
        self._compile_options: dict[str, Any] = {}

    # --- before torch is imported -------------------------------------------------------------------------------------

    def require(self) -> None:
        """Return if TorchNeuron is installed and sees a device. All that is missing is named at once."""
        missing = [*self._missing_packages(), *self._missing_driver()] or self._missing_device()
        if missing:
            raise BackendUnavailable(
                f"device 'neuron' is not usable here; missing: {'; '.join(missing)}. Install on a Trn2 or Trn3 instance: "
                f"{INSTALL}; or use --run.device cpu"
            )

    def _missing_packages(self) -> list[str]:
        missing = []
        if sys.version_info[:2] < self.oldest_python:
            wanted, got = (".".join(map(str, version)) for version in (self.oldest_python, sys.version_info[:2]))
            missing.append(f"Python {wanted} or later (this is {got})")
        if importlib.util.find_spec("torch_neuronx") is None:
            return [*missing, "package torch_neuronx (not installed)"]
        neuronx, torch_version = installed_version("torch-neuronx"), installed_version("torch")
        if neuronx and _family(neuronx) < (2, 13):
            missing.append(f"native torch-neuronx, 2.13 or 2.14 (found {neuronx}, which is built on XLA)")
        elif neuronx and torch_version and _family(neuronx) != _family(torch_version):
            wanted = ".".join(map(str, _family(neuronx)))
            missing.append(f"torch {wanted}, which torch-neuronx {neuronx} pairs with (found torch {torch_version})")
        return missing

    def _missing_driver(self) -> list[str]:
        if any(self.device_nodes.parent.glob(self.device_nodes.name)):
            return []
        return [f"the Neuron driver (no {self.device_nodes}; use a Neuron Base DLAMI and check with neuron-ls)"]

    def _missing_device(self) -> list[str]:
        """Whether torch sees a device, asked only once everything that it needs is there."""
        try:
            import torch  # loads torch_neuronx too, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0

            importlib.import_module("torch_neuronx")
        except (ImportError, RuntimeError) as error:
            return [f"a torch_neuronx that loads ({error})"]
        neuron = getattr(torch, "neuron", None)
        if neuron is None:
            return ["torch.neuron (torch_neuronx did not register it: another device plug-in was loaded first)"]
        if not neuron.is_available():
            return ["a free NeuronCore (torch.neuron.is_available() is False; check with neuron-ls, stop stale processes)"]
        return []

    def check_ranks(self, local_ranks: int, chip: str | None = None) -> None:
        if problem := neuron_cores.problem_with_ranks(local_ranks, table_name(chip), self._num_chips()):
            raise BackendUnavailable(problem)

    def machine_checks(self, local_ranks: int, chip: str | None, instance: str | None = None) -> list[Check]:
        num_chips = self._num_chips() if instance is None else neuron_cores.CHIPS_OF[instance]
        cores = neuron_cores.check_cores(local_ranks, table_name(chip), num_chips)
        return [cores, neuron_cores.check_logical_core_config()]

    def _num_chips(self) -> int:
        """Chips of this host, without waking the runtime: one device node each, as seen in the field, not in documentation."""
        nodes = (path.name for path in self.device_nodes.parent.glob(self.device_nodes.name))
        return sum(name.removeprefix("neuron").isdecimal() for name in nodes)

    def wanted_environment(self) -> tuple[tuple[str, str, str], ...]:
        """Each is read once, when torch_neuronx loads or first compiles.

        Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/reference/env-vars.html
        """
        counted = "where compiled graphs are kept; AWS's default, set so that the cache that is counted is the one in use"
        return (
            (CACHE_VARIABLE, DEFAULT_CACHE, counted),
            ("TORCH_NEURONX_METRICS_ENABLED", "1", "compile-cache hits and misses are counted only if asked for"),
            ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1", "a graph that fails to compile raises, not runs eagerly"),
            ("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", "1", "an operator that fails raises, not runs on the host"),
        )

    # --- the device ---------------------------------------------------------------------------------------------------

    def device(self, local_rank: int = 0) -> torch.device:
        """Without an index: in a launched process only one index is valid, and that one is the current device."""
        import torch

        return torch.device("neuron")

    def synchronize(self) -> None:
        _neuron().synchronize()

    def memory(self) -> Memory:
        """What torch_neuronx's caching allocator holds; waits for the device, because the allocator runs asynchronously.

        Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/torch/guides/memory-profiling-guide.html
        """
        (neuron := _neuron()).synchronize()
        properties = _ask(neuron, "get_device_properties", _ask(neuron, "current_device"))
        return Memory(
            allocated_bytes=_count(_ask(neuron, "memory_allocated")),
            peak_allocated_bytes=_count(_ask(neuron, "max_memory_allocated")),
            reserved_bytes=_count(_ask(neuron, "memory_reserved")),
            total_bytes=_count(getattr(properties, "total_memory", None)),
        )

    def reset_peak_memory(self) -> None:
        _ask(_neuron(), "reset_peak_memory_stats")

    # --- compiling ----------------------------------------------------------------------------------------------------

    def compile_settings(self) -> dict[str, str | None]:
        """With LNC as it is resolved: a graph compiled for one size of logical core does not run on another."""
        return {**super().compile_settings(), "LNC": str(neuron_cores.logical_core_config()[0])}

    def compile_kwargs(self) -> dict[str, Any]:
        """The options, as one dict object for all blocks.

        The compiler writes into the dict that it gets. Dynamo reuses a graph only for equal options, so a fresh dict for each
        block would compile identical blocks again. The dict must not be empty: torch.compile drops an empty one.
        """
        refuse = os.environ.get("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1")
        self._compile_options.setdefault("fallback_execution", refuse == "0")  # says the same as the variable
        return {"options": self._compile_options}

    def compile_cache(self) -> CompileCache:
        """The NEFF files of eager operators and compiled graphs alike; hits and misses of this process."""
        return CompileCache.at(Path(os.environ.get(CACHE_VARIABLE, DEFAULT_CACHE)), ".neff", *self.compile_cache_counters())

    def compile_cache_counters(self) -> tuple[int | None, int | None]:
        return _counter("CompilationCache.PersistentHits"), _counter("CompilationCache.PersistentMisses")

    def compiled_graphs(self) -> list[str] | None:
        metrics = _ask(_neuron(), "get_dynamo_metrics")
        ids = None if metrics is None else [getattr(entry, "graph_id", None) for entry in metrics]
        return None if ids is None or None in ids else [str(graph_id) for graph_id in ids]

    def fallback_ops(self) -> dict[str, int | None] | None:
        """Names only: torch_neuronx does not count them."""
        names = _ask(_module("torch_neuronx"), "get_fallback_ops")
        return None if names is None else dict.fromkeys(sorted(map(str, names)))

    # --- measuring ----------------------------------------------------------------------------------------------------

    def chip(self) -> str | None:
        target = _ask(_module("torch_neuronx.utils"), "get_platform_target")
        return table_name(str(target)) or str(target) if target else None

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        """One logical core's share of the chip's peaks: with LNC=2 a quarter of a Trainium2."""
        listed = table_name(chip or self.chip())
        physical, lnc = neuron_cores.PHYSICAL_CORES.get(listed or ""), neuron_cores.logical_core_config()[0]
        if physical is None or lnc is None:
            return []
        share = f"1/{physical // lnc} of the chip (LNC={lnc})"
        return [
            dataclasses.replace(
                peak, flops=peak.flops * lnc / physical, per="logical core", convention=f"{peak.convention}; {share}"
            )
            for peak in peaks_for(listed, dtype)
        ]

    def limits(self, chip: str | None = None) -> ChipLimits | None:
        """One logical core's share of the chip's memory and bandwidth: with LNC=2 a quarter of a Trainium2."""
        whole = super().limits(chip)
        physical, lnc = neuron_cores.PHYSICAL_CORES.get(whole.chip if whole else ""), neuron_cores.logical_core_config()[0]
        if whole is None or physical is None or lnc is None:
            return None
        return whole.shared_by(physical // lnc)

    def profile_arguments(self, directory: Path) -> dict[str, Any]:
        """Torch's trace, and where torch_neuronx.profiling exists its own capture for Neuron Explorer.

        That capture reserves about 5 GB of device memory on Trainium2.

        Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/neuron-explorer/how-to-profile-workload.html
        """
        from torch.profiler import ProfilerActivity

        arguments = super().profile_arguments(directory)
        arguments["activities"] = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
        profiling = _module("torch_neuronx.profiling")
        config_class, profiler_class = (getattr(profiling, name, None) for name in ("NeuronConfig", "NeuronProfiler"))
        if config_class and profiler_class:
            config = config_class(profile_output_dir=str(directory))
            arguments |= {"experimental_config": config, "on_trace_ready": profiler_class(config).export_trace}
        return arguments

    def describe(self) -> dict[str, Any]:
        lnc, source = neuron_cores.logical_core_config()
        return {
            **super().describe(),
            "torch_neuronx": installed_version("torch-neuronx"),
            "neuronx_cc": installed_version("neuronx-cc"),
            "driver": (read_text(self.driver_version_file) or "").strip() or None,
            "devices": _count(_ask(_neuron(), "device_count")),
            "logical_core_config": lnc,
            "logical_core_config_source": source,
            "environment": {
                name: value for name, value in sorted(os.environ.items()) if name.startswith(("NEURON_", "TORCH_NEURONX_"))
            },
        }


def _neuron() -> Any:
    """The device module, which torch_neuronx adds to torch; torch's type stubs do not know it."""
    import torch

    return getattr(torch, "neuron")  # noqa: B009


def _module(name: str) -> Any:
    """A module of torch_neuronx. None: this installation has none of that name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _ask(owner: Any, function: str, *arguments: Any) -> Any:
    """Call a function that the documentation could not confirm. None: it is missing, or it fails, in whatever way."""
    try:
        return getattr(owner, function)(*arguments)
    except Exception:
        return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _counter(name: str) -> int | None:
    """One counter of the compile cache since the process started. None: counting is off, or the counter is not there.

    A counter may come into being when it first counts. It is a measured zero if nothing at all has been counted yet, or if
    only other counters of the cache have been.
    """
    metrics = _module("torch_neuronx.metrics")
    if not _ask(metrics, "is_enabled"):
        return None
    names = _ask(metrics, "get_counter_names")
    if names is not None and name not in names:
        return 0 if not names or any(other.startswith("CompilationCache.") for other in names) else None
    return _count(_ask(metrics, "get_counter_value", name))


def _family(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
