"""The only place that knows a device. ``get_backend("neuron")`` costs no torch import."""

from __future__ import annotations

import functools
import importlib

from backends.base import Backend, BackendUnavailable

_CLASSES = {"cpu": "CpuBackend", "cuda": "CudaBackend", "neuron": "NeuronBackend"}
NAMES = tuple(_CLASSES)


@functools.cache
def get_backend(name: str) -> Backend:
    """Return the backend with this name, always the same object; `require()` on it says whether the device is usable here.

    Raises:
        ValueError: if there is no backend of this name.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown device {name!r}; allowed: {', '.join(NAMES)}")
    module = importlib.import_module(f"backends.{name}")
    return getattr(module, _CLASSES[name])()


__all__ = ["NAMES", "Backend", "BackendUnavailable", "get_backend"]
