"""A Backend whose answers are scripted, so that a test of the loop decides what the device says and sees what it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends.base import Backend, BackendUnavailable, CompileCache, Memory
from backends.peak_flops import Peak

if TYPE_CHECKING:
    import torch

FAKE_PEAK = Peak("Fake 1", "float32", 1e12, "device", "scripted", "tests/fake_backend.py")


@dataclass
class FakeClock:
    """Time that passes only when a test says so; call it to read seconds."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(eq=False, kw_only=True)
class FakeBackend(Backend):
    """Computes on torch's CPU device; everything else is as scripted. Snapshots are handed out in order, the last for good."""

    name = "fake"
    compile_backend = "eager"
    process_group = "gloo"

    clock: Callable[[], float] = time.perf_counter
    unavailable: str | None = None
    """If set, `require` raises with this message."""
    environment: tuple[tuple[str, str, str], ...] = ()
    on_synchronize: Callable[[], None] = lambda: None
    """Called by `synchronize`, for example to let a FakeClock advance."""
    memory_query: Callable[[], Memory] = Memory
    """May raise, as the memory queries of a real device may: then every field is None."""
    caches: Sequence[CompileCache] = (CompileCache(),)
    fallbacks: Sequence[dict[str, int | None] | None] = (None,)
    chip_name: str | None = "Fake 1"
    known_peaks: Sequence[Peak] = (FAKE_PEAK,)
    calls: list[tuple[float, str]] = field(default_factory=list)
    """(time, member) of each call, in order."""

    def __post_init__(self) -> None:
        self._caches, self._fallbacks = _in_order(self.caches), _in_order(self.fallbacks)

    def called(self, member: str) -> list[float]:
        """The times at which a member was called."""
        return [when for when, name in self.calls if name == member]

    def _log(self, member: str) -> None:
        self.calls.append((self.clock(), member))

    def require(self) -> None:
        self._log("require")
        if self.unavailable is not None:
            raise BackendUnavailable(self.unavailable)

    def wanted_environment(self) -> tuple[tuple[str, str, str], ...]:
        return self.environment

    def device(self, local_rank: int = 0) -> torch.device:
        import torch

        self._log("device")
        return torch.device("cpu")

    def seed(self, seed: int) -> None:
        self._log("seed")
        super().seed(seed)

    def synchronize(self) -> None:
        self._log("synchronize")
        self.on_synchronize()

    def memory(self) -> Memory:
        self._log("memory")
        try:
            return self.memory_query()
        except Exception:
            return Memory()

    def reset_peak_memory(self) -> None:
        self._log("reset_peak_memory")

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        import torch

        self._log("autocast")
        return torch.autocast(device_type="cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def compile_cache(self) -> CompileCache:
        self._log("compile_cache")
        return next(self._caches)

    def compile_cache_counters(self) -> tuple[int | None, int | None]:
        cache = self.compile_cache()
        return cache.hits, cache.misses

    def fallback_ops(self) -> dict[str, int | None] | None:
        self._log("fallback_ops")
        return next(self._fallbacks)

    def chip(self) -> str | None:
        return self.chip_name

    def peaks(self, dtype: str, chip: str | None = None) -> list[Peak]:
        wanted = chip or self.chip()
        return [peak for peak in self.known_peaks if (peak.chip, peak.dtype) == (wanted, dtype)]


def _in_order(script: Sequence[Any]) -> Iterator[Any]:
    yield from script
    while True:
        yield script[-1]
