"""Counters, off unless TORCH_NEURONX_METRICS_ENABLED=1."""

from __future__ import annotations

import os
from collections import Counter

COUNTERS = ("InMemoryHits", "InMemoryMisses", "PersistentHits", "PersistentMisses", "TotalCompilations", "Evictions")
_enabled = os.environ.get("TORCH_NEURONX_METRICS_ENABLED") == "1"
_counts: Counter[str] = Counter()


def count(name: str) -> None:
    """Add one to CompilationCache.<name>."""
    if _enabled:
        _counts[f"CompilationCache.{name}"] += 1


def set_enabled(enabled: bool) -> None:
    """Switch counting on or off."""
    global _enabled
    _enabled = enabled


def is_enabled() -> bool:
    """Whether anything is counted."""
    return _enabled


def get_counter_names() -> list[str]:
    """Names of the counters that have counted something."""
    return sorted(_counts)


def get_counter_value(name: str) -> int:
    """The value of one counter."""
    return _counts[name]


def clear_counters() -> None:
    """Start again from zero."""
    _counts.clear()
