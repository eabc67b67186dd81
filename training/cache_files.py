"""The files of a persistent compile cache: which count, which are damaged, which are old."""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

SIZES = ".unpacked.json"
"""In a cache's folder: how long each unpacked entry is."""
_LEFT_OUT = (".*", "*.lock", "*.gch", "*.partial")
"""Locks, files being written, and precompiled headers, which are large and only help to compile something new."""
_SETTLED_SECONDS = 10
"""An empty file younger than this may still be written."""


def files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of every file of a cache that is worth keeping, sorted by path. Links are left out."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            with suppress(FileNotFoundError):  # another process has just replaced it
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and not any(fnmatch(name, pattern) for pattern in _LEFT_OUT):
                    yield path.relative_to(directory).as_posix(), status


def sizes(directory: Path) -> dict[str, int]:
    """Return how long each entry was that was unpacked there, by path."""
    try:
        found = json.loads((directory / SIZES).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def remember_sizes(directory: Path, found: dict[str, int]) -> None:
    """Write down how long each unpacked entry is."""
    partial = directory / f"{SIZES}.{secrets.token_hex(4)}.partial"
    partial.write_text(json.dumps(found), encoding="utf-8")
    os.replace(partial, directory / SIZES)


def repair(directory: Path) -> list[str]:
    """Remove entries that are empty, or shorter than they were unpacked, and return their paths.

    What a kill or a full disk left behind is there, and yet cannot be used: the compiler would be trusted to notice.
    """
    known, removed = sizes(directory), []
    for path, status in files(directory):
        empty = status.st_size == 0 and time.time() - status.st_mtime > _SETTLED_SECONDS
        if empty or status.st_size < known.get(path, 0):
            with suppress(OSError):
                (directory / path).unlink()
                removed.append(path)
    if known.keys() & set(removed):  # what is compiled in their place has a length of its own
        with suppress(OSError):
            remember_sizes(directory, {path: size for path, size in known.items() if path not in removed})
    return removed


def prune(directory: Path, older_than_days: float, dry_run: bool = False) -> list[tuple[str, int]]:
    """Remove entries that were written longer ago than that, and return paths and bytes."""
    before, removed = time.time() - 86_400 * older_than_days, []
    for path, status in files(directory):
        if status.st_mtime < before:
            if not dry_run:
                with suppress(FileNotFoundError):
                    (directory / path).unlink()
            removed.append((path, status.st_size))
    return removed
