"""`python -m ledger cache`: a compile cache as one portable file, and what lies in one."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends import NAMES, get_backend
from backends.base import Backend
from ledger.cache_pack import CachePackError, differences, pack, unpack, verify
from ledger.screen import amount
from training.cache_files import files, prune


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add pack, verify, unpack, stat and prune."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        added.add_argument("--device", default="cpu", choices=NAMES, help="whose cache (cpu)")
        added.add_argument("--directory", type=Path, help="where the cache is; default: where the device keeps it")
        added.add_argument("--json", action="store_true", help="the same as data")
        return added

    command("pack", _pack, "write the cache into one file").add_argument("file", type=Path, metavar="FILE")
    command("verify", _verify, "whether a pack is whole, and would hit here").add_argument("file", type=Path, metavar="FILE")
    command("unpack", _unpack, "fill the cache from a pack").add_argument("file", type=Path, metavar="FILE")
    command("stat", _stat, "how much there is, and how old")
    pruned = command("prune", _prune, "remove what was compiled long ago; it is compiled again when it is needed")
    pruned.add_argument("--older-than-days", type=float, required=True, metavar="DAYS")
    pruned.add_argument("--yes", action="store_true", help="do it; without this it is only said what would be removed")


def _place(options: argparse.Namespace) -> tuple[Backend, Path]:
    backend = get_backend(options.device)
    directory = options.directory or backend.compile_cache().directory
    if directory is None:
        raise CachePackError(f"--directory: {options.device} does not say where its compile cache is; name the folder")
    return backend, Path(directory)


def _answer(options: argparse.Namespace, data: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(data, indent=1) if options.json else "\n".join(lines))


def _pack(options: argparse.Namespace) -> int:
    backend, directory = _place(options)
    manifest = pack(backend, directory, options.file)
    size = options.file.stat().st_size
    conditions = {name: value for name, value in manifest.conditions.items() if value is not None}
    lines = [
        f"{options.file}: {len(manifest.entries):,} entries of {directory}, {amount(manifest.bytes, 'bytes')}, "
        f"packed {amount(size, 'bytes')}",
        *(f"  {name}: {value}" for name, value in conditions.items()),
    ]
    _answer(options, {"file": str(options.file), "bytes": size, **asdict(manifest)}, lines)
    return 0


def _verify(options: argparse.Namespace) -> int:
    backend, _ = _place(options)
    manifest, damaged = verify(options.file)
    differ, unknown = differences(manifest, backend)
    lines = [f"{options.file}: {len(manifest.entries):,} entries, {len(damaged)} damaged"]
    lines += [f"  damaged: {path}" for path in damaged]
    lines += [f"  would not hit here: {line}" for line in differ] or ["  would hit here, as far as versions and flags tell"]
    lines += [f"  cannot tell: {line}" for line in unknown]
    _answer(options, {"damaged": damaged, "differ": differ, "unknown": unknown, "entries": len(manifest.entries)}, lines)
    return 1 if damaged or differ else 0


def _unpack(options: argparse.Namespace) -> int:
    backend, directory = _place(options)
    done = unpack(options.file, backend, directory)
    lines = [f"{directory}: {len(done.written):,} entries written, {len(done.present):,} were there"]
    lines += [f"  damaged, dropped: {path}" for path in done.damaged]
    _answer(options, {"directory": str(directory), **asdict(done)}, lines)
    return 1 if done.damaged else 0


def _stat(options: argparse.Namespace) -> int:
    _, directory = _place(options)
    found = list(files(directory))
    now = time.time()
    ages = [(now - status.st_mtime) / 86_400 for _, status in found]
    data = {
        "directory": str(directory.absolute()),
        "entries": len(found),
        "bytes": sum(status.st_size for _, status in found),
        "empty": [path for path, status in found if status.st_size == 0],
        "oldest_days": max(ages, default=None),
        "newest_days": min(ages, default=None),
    }
    lines = [f"{data['directory']}: {len(found):,} entries, {amount(data['bytes'], 'bytes')}"]
    if ages:
        lines.append(f"  oldest {max(ages):.1f} days, newest {min(ages):.1f} days")
    lines += [f"  empty: {path}" for path in data["empty"]]
    _answer(options, data, lines)
    return 0


def _prune(options: argparse.Namespace) -> int:
    _, directory = _place(options)
    if not options.older_than_days >= 0:
        raise CachePackError(f"--older-than-days: got {options.older_than_days}, allowed: 0 or more")
    removed = prune(directory, options.older_than_days, dry_run=not options.yes)
    size = sum(size for _, size in removed)
    said = "removed" if options.yes else "would remove"
    lines = [
        f"{said} {len(removed):,} entries of {directory}, {amount(size, 'bytes')}" + ("" if options.yes else "; add --yes")
    ]
    _answer(options, {"removed": options.yes, "entries": [path for path, _ in removed], "bytes": size}, lines)
    return 0
