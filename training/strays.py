"""Files that runs left half written because they were killed. Torch-free.

A run cleans up after itself. One that was killed cannot, so the run that goes on in its place does, once it has saved.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from training.checkpoint_store import MARKER
from training.processes import machine_id, read_process

_PARTS = (".record.json.partial", "checkpoints/.hf.*.partial")


def remove_strays(own: Path, recipe: str, store: str) -> list[Path]:
    """Delete what earlier runs of the recipe left half written, and return what that was.

    Touched are runs that have ended or whose process is gone, runs that saved where this one does, and runs that were killed
    before they had written a record. A folder that a run may still save to keeps its unfinished checkpoints.

    Args:
        own: folder of this run. Its name begins with the time, so that those of earlier runs sort before it.
        recipe: name of the recipe.
        store: where this run saves.
    """
    records = {folder: _record(folder) for folder in sorted(own.parent.glob(f"*-{recipe}-*")) if folder.is_dir()}
    in_use = {os.path.abspath(_store(record)) for record in records.values() if record and not _is_over(record)}
    in_use.add(os.path.abspath(store))
    strays: list[Path] = []
    for folder, record in records.items():
        if folder.name >= own.name or record is None:
            continue
        if _is_over(record) or _store(record) == store:
            strays += [path for pattern in _PARTS for path in folder.glob(pattern)]
        if _is_over(record) and os.path.abspath(folder / "checkpoints") not in in_use:
            strays += [path for path in folder.glob("checkpoints/step-*") if not (path / MARKER).exists()]
        if not record and not set(folder.iterdir()) - set(strays):
            strays.append(folder)
    for stray in strays:
        if stray.is_dir():
            shutil.rmtree(stray, ignore_errors=True)
        else:
            stray.unlink(missing_ok=True)
    return strays


def _record(folder: Path) -> dict[str, Any] | None:
    """Return a run's record; an empty one if there is none. None: it cannot be read."""
    try:
        return json.loads((folder / "record.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None


def _store(record: dict[str, Any]) -> str:
    return (record.get("checkpoints") or {}).get("folder") or ""


def _is_over(record: dict[str, Any]) -> bool:
    """Whether nobody writes for this run any more, as far as can be known from here."""
    return record.get("status") != "running" or is_gone(record)


def own_process() -> dict[str, Any]:
    """Return what tells later whether this process is still there."""
    process = read_process(os.getpid())
    return {"machine": machine_id(), "pid": os.getpid(), "started": None if process is None else process.started}


def is_gone(record: dict[str, Any]) -> bool:
    """Whether a record's process has certainly ended; False where that cannot be known from this machine."""
    identity = (record.get("identity") or {}).get("process") or {}
    if record.get("status") != "running" or identity.get("started") is None or identity.get("machine") != machine_id():
        return False
    process = read_process(identity["pid"])
    return process is None or not process.is_alive or process.started != identity["started"]
