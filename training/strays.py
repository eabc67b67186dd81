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

    Touched are runs that saved where this one does, runs whose process is gone, and runs that were killed before they had
    written a first record.

    Args:
        own: folder of this run. Its name begins with the time, so that those of earlier runs sort before it.
        recipe: name of the recipe.
        store: where this run saves.
    """
    strays: list[Path] = []
    for folder in sorted(own.parent.glob(f"*-{recipe}-*")):
        if folder.name >= own.name or not folder.is_dir():
            continue
        try:
            record = json.loads((folder / "record.json").read_text())
        except FileNotFoundError:
            record = {}
        except (OSError, ValueError):
            continue
        gone = not record or is_gone(record)
        if gone or (record.get("checkpoints") or {}).get("folder") == store:
            strays += [path for pattern in _PARTS for path in folder.glob(pattern)]
        if gone:
            strays += [path for path in folder.glob("checkpoints/step-*") if not (path / MARKER).exists()]
            strays += [folder] if not record and not set(folder.iterdir()) - set(strays) else []
    for stray in strays:
        if stray.is_dir():
            shutil.rmtree(stray, ignore_errors=True)
        else:
            stray.unlink(missing_ok=True)
    return strays


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
