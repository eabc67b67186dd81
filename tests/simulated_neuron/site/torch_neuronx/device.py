"""torch.neuron, the process group of the same name, and what the real ones refuse."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_LOG = logging.getLogger("torch_neuronx")
_loaded: dict[str, Any] = {}
_narrowed: set[str] = set()
_core_is_settled = False


def extension(name: str = "neuron_device") -> Any:
    """Return one of the built extensions."""
    if name not in _loaded:
        path = Path(os.environ["FIRSTSTEP_SIMULATED_NEURON"]) / f"{name}.so"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        _loaded[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(_loaded[name])
    return _loaded[name]


def register() -> None:
    """Make `neuron` a device of torch."""
    native = extension()
    native.register_hooks()
    lnc = 1 if os.environ.get("NEURON_LOGICAL_NC_CONFIG") == "1" else 2
    native.set_cores(max(8 // lnc, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), -1)
    torch.utils.rename_privateuse1_backend("neuron")
    module = NeuronModule("torch.neuron")
    torch._register_device_module("neuron", module)
    sys.modules["torch.neuron"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    native.on_first_use(_first_use)
    _register_process_group()


def _first_use(name: str, arguments: str) -> None:
    """Compile an eager operator for the types and shapes that it meets for the first time."""
    from torch_neuronx import neff_cache

    if ("Long" in arguments or "Double" in arguments) and name not in _narrowed:
        _narrowed.add(name)
        _LOG.warning("%s: 64-bit operands are computed in 32 bits and may lose range or precision", name)
    neff_cache.fetch_operator(name, arguments)


class NeuronModule(ModuleType):
    """The device module. Its functions are attributes of one object, as torch looks them up by name."""

    _initialized = True  # without it torch.utils.checkpoint does not save the generator
    Stream, Event = torch.Stream, torch.Event

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return extension().device_count()

    def current_device(self) -> int:
        return extension().current_device()

    def set_device(self, device: Any) -> None:
        extension().set_device(_index(device))

    def device(self, device: Any) -> Any:
        return torch.accelerator.device_index(_index(device))

    def get_device_name(self, device: Any = None) -> str:
        return f"neuron:{_index(device)}"  # not the chip's name, as in the real one

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(device), total_memory=24 * 2**30)

    def init(self) -> None:
        pass

    def is_initialized(self) -> bool:
        return extension().touched()

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        pass

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def default_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def stream(self, stream: torch.Stream | None) -> Any:
        return stream if stream is not None else torch.accelerator.current_stream()

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.current_stream().wait_stream(stream)

    def wait_event(self, event: torch.Event) -> None:
        self.current_stream().wait_event(event)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        return self.current_stream().record_event(event)

    def query(self) -> bool:
        return self.current_stream().query()

    @property
    def default_generators(self) -> list[torch.Generator]:
        return [extension().default_generator(index) for index in range(self.device_count())]

    def manual_seed(self, seed: int) -> None:
        extension().default_generator(-1).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)  # of the cores of this host, a launched process drives one

    def seed(self) -> None:
        extension().default_generator(-1).seed()

    def seed_all(self) -> None:
        self.seed()

    def initial_seed(self) -> int:
        return extension().default_generator(-1).initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return extension().default_generator(_index(device)).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        extension().default_generator(_index(device)).set_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.memory_allocated()

    def max_memory_allocated(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_allocated()

    def memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.memory_reserved()

    def max_memory_reserved(self, device: Any = None) -> int:
        return torch.accelerator.max_memory_reserved()

    def memory_stats(self, device: Any = None) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats())

    def memory_summary(self, device: Any = None) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.memory_stats().items())

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_accumulated_memory_stats()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    def get_dynamo_metrics(self) -> list[Any]:
        compiler = sys.modules.get("torch_neuronx.compiler")
        return [] if compiler is None else list(compiler.METRICS)

    def reset_dynamo_metrics(self) -> None:
        if (compiler := sys.modules.get("torch_neuronx.compiler")) is not None:
            compiler.METRICS.clear()


def _index(device: Any) -> int:
    if device is None:
        return -1
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return -1 if index is None else index


def _register_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("neuron", _process_group, devices=["neuron"])


def _process_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Create the collectives of one group. The first decides which core this process drives."""
    import torch.distributed as dist

    global _core_is_settled
    native = extension()
    if not _core_is_settled:
        if native.touched():
            raise RuntimeError("the Neuron runtime is already initialised: create the process group before touching the device")
        core = int(os.environ.get("LOCAL_RANK", "0"))
        native.set_cores(max(native.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), core)
        _core_is_settled = True
    return extension("neuron_collectives").Collectives(dist.ProcessGroupGloo(store, rank, size, timeout))
