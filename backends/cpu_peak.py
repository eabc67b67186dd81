"""Peak FLOP/s of the host's processor: no vendor prints one, so it is measured, and kept for the next run."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from backends.peak_flops import Peak

SIZES = (512, 1024, 2048)
RUNS = 5
BUDGET_SECONDS = 1.0
"""A larger size is left out when it is expected to exceed what is left of this."""


def peak(dtype: str, model: str | None) -> Peak:
    """The best rate of a square matrix product in `dtype` with the threads that torch uses now.

    Args:
        dtype: float32 or bfloat16. Measured as it runs, also where the processor has no native bfloat16.
        model: model name of the processor. None: unknown, so the result is not kept: it might be read on another machine.
    """
    import torch

    threads = torch.get_num_threads()
    key = f"{model} | {torch.backends.cpu.get_cpu_capability()} | {threads} threads | torch {torch.__version__} | {dtype}"
    entry = _valid(_read(cache_file()).get(key)) if model else None
    if entry is None:
        flops, size = measure(getattr(torch, dtype))
        entry = {"flops": flops, "size": size, "date": datetime.date.today().isoformat()}
        if model:
            _keep(cache_file(), key, entry)
    size, date = entry["size"], entry["date"]
    source = f"measured: {size}x{size} matmul, {threads} threads, {date}"
    return Peak(model or "unknown CPU", dtype, entry["flops"], "device", "best measured matmul", source, measured=True)


def measure(dtype: Any) -> tuple[float, int]:
    """Time square matrix products; return the best FLOP/s and the size that reached it. Draws no random number."""
    import torch

    best, best_size, started = 0.0, 0, time.perf_counter()
    for size in SIZES:
        matrix = torch.full((size, size), 0.5, dtype=dtype, device="cpu")
        fastest = float("inf")
        with torch.inference_mode():
            for _ in range(RUNS):  # the first one also wakes the threads; the best of them is kept
                begin = time.perf_counter()
                torch.mm(matrix, matrix)
                fastest = min(fastest, time.perf_counter() - begin)
        if 2 * size**3 / fastest > best:
            best, best_size = 2 * size**3 / fastest, size
        if time.perf_counter() - started + RUNS * 8 * fastest > BUDGET_SECONDS:
            break
    return best, best_size


def cache_file() -> Path:
    """Where measured peaks are kept."""
    home = os.path.expanduser("~")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"), "firststep", "cpu_peak.json")


def _read(path: Path) -> dict[str, Any]:
    """All kept entries. A file that is missing or damaged holds none, and is rewritten after the next measurement."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _valid(entry: Any) -> dict[str, Any] | None:
    """The entry, if it is one. None: it is missing or damaged."""
    fields = {"flops": float, "size": int, "date": str}
    whole = isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in fields.items())
    return entry if whole else None


def _keep(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Add one entry; readers see the old file or the new one, never half of it.

    A folder that cannot be written costs the next run a second of measuring, and changes no number.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({**_read(path), key: entry}, file, indent=1)
        Path(file.name).replace(path)
