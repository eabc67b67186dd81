"""A compile cache as one file: packed where it was filled, unpacked where it will hit, and refused where it would not.

A pack is a zip archive: `manifest.json` first, then the cache's files. The manifest says under which versions and flags, for
which chip and size of logical core the entries were compiled, and the size and SHA-256 of each. Unpacking writes files and runs
nothing; the entries themselves are compiled code, so unpack only what you would also run.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import sys
import zipfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any

from backends.base import Backend
from training.cache_files import files, remember_sizes, sizes

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 20


class CachePackError(ValueError):
    """A pack or a cache that cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Entry:
    """One file of a cache."""

    path: str
    """Below the cache's folder, with slashes."""
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a pack says of itself."""

    format: int
    created_utc: str
    conditions: dict[str, str | None]
    """What a machine must have in common with the one that compiled. None: not set, or unknown."""
    entries: list[Entry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Unpacked:
    """What became of the entries of a pack, by path."""

    written: list[str]
    present: list[str]
    """Left alone: the cache had them."""
    damaged: list[str]
    """Dropped: they are not what the manifest says."""


def conditions(backend: Backend) -> dict[str, str | None]:
    """Return what decides whether a compiled entry is found and runs: versions, flags, chip, and LNC where there is one."""
    found = {"device": backend.name, **backend.compile_settings(), "chip": backend.chip(), "architecture": platform.machine()}
    if backend.compile_backend == "inductor":  # its kernels are Python extensions, compiled for this very processor
        found["Python"] = ".".join(map(str, sys.version_info[:2]))
        found["processor features"] = _processor_features()
    return found


def _processor_features() -> str | None:
    """Return a hash of what /proc/cpuinfo lists. None: it lists nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split()
    return hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:16] if flags else None


def differences(manifest: Manifest, backend: Backend) -> tuple[list[str], list[str]]:
    """Return the conditions that differ here, and those that are unknown on one of the two sides, each in words."""
    here, differ, unknown = conditions(backend), [], []
    for name in sorted(manifest.conditions.keys() | here.keys(), key=lambda name: (name != "device", name)):
        packed, mine = manifest.conditions.get(name), here.get(name)
        if packed == mine:
            continue
        if name == "device":  # then the rest does too
            return [f"device: packed for {packed}, here {mine}"], []
        line = f"{name}: packed with {packed or 'none'}, here {mine or 'none'}"
        # The name of a chip can only be asked for where there is one.
        (unknown if name == "chip" and None in (packed, mine) else differ).append(line)
    return differ, unknown


def pack(backend: Backend, directory: Path, file: Path) -> Manifest:
    """Write a cache into a pack, complete or not at all.

    Raises:
        CachePackError: if the cache holds nothing, or the file cannot be written.
    """
    listed = []
    for path, _ in files(directory):
        with open(directory / path, "rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
            listed.append(Entry(path, source.tell(), digest))
    if not listed:
        raise CachePackError(f"nothing to pack: {directory} holds no entry; fill it with `train.py RECIPE --precompile`")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(FORMAT, now, conditions(backend), listed)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(MANIFEST, json.dumps(asdict(manifest), indent=1))
            for entry in listed:
                archive.write(directory / entry.path, f"cache/{entry.path}")
        os.replace(partial, file)
    except OSError as error:
        raise CachePackError(f"{file}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def open_pack(file: Path) -> tuple[zipfile.ZipFile, Manifest]:
    """Open a pack and read its manifest.

    Raises:
        CachePackError: if it is no pack, is cut off, is of a newer format, or names a path outside of the cache.
    """
    try:
        archive = zipfile.ZipFile(file)
        content: dict[str, Any] = json.loads(archive.read(MANIFEST))
        number = content["format"]
        if number != FORMAT:
            raise CachePackError(f"{file}: format {number}, this version reads {FORMAT}")
        entries = [Entry(str(each["path"]), int(each["bytes"]), str(each["sha256"])) for each in content["entries"]]
        found = dict(content["conditions"])
        manifest = Manifest(number, str(content["created_utc"]), found, entries)
    except CachePackError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError, EOFError, AttributeError) as error:
        raise CachePackError(f"{file}: no cache pack, or cut off ({error})") from None
    for entry in manifest.entries:
        _check_path(entry.path, file)
    return archive, manifest


def _check_path(path: str, file: Path) -> None:
    pure = PurePosixPath(path)
    plain = path and "\0" not in path and "\\" not in path and ":" not in path and str(pure) == path
    if not plain or pure.is_absolute() or ".." in pure.parts or pure.name.startswith("."):
        raise CachePackError(f"{file}: entry {path!r} would lie outside of the cache; this is no pack of ours")


def verify(file: Path) -> tuple[Manifest, list[str]]:
    """Return a pack's manifest, and the paths of the entries that are not what it says.

    Raises:
        CachePackError: as open_pack does.
    """
    archive, manifest = open_pack(file)
    with archive:
        return manifest, [entry.path for entry in manifest.entries if not _copy(archive, entry, None)]


def unpack(file: Path, backend: Backend, directory: Path) -> Unpacked:
    """Write the entries of a pack into a cache. Each appears whole or not at all.

    Raises:
        CachePackError: before anything is written, if entries would not hit here: the message names what differs.
    """
    archive, manifest = open_pack(file)
    with archive:
        differ, _ = differences(manifest, backend)
        if differ:
            raise CachePackError(f"{file}: would not hit here: {'; '.join(differ)}")
        written, present, damaged = [], [], []
        for entry in manifest.entries:
            target = directory / entry.path
            if not target.parent.resolve().is_relative_to(directory.resolve()):
                raise CachePackError(f"{target}: a link leads out of the cache; remove it")
            if target.is_file() and not target.is_symlink() and target.stat().st_size == entry.bytes:
                present.append(entry.path)
            elif _write(archive, entry, target):
                written.append(entry.path)
            else:
                damaged.append(entry.path)
    directory.mkdir(parents=True, exist_ok=True)
    good = {entry.path: entry.bytes for entry in manifest.entries if entry.path not in damaged}
    remember_sizes(directory, sizes(directory) | good)
    return Unpacked(written, present, damaged)


def _write(archive: zipfile.ZipFile, entry: Entry, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            whole = _copy(archive, entry, file)
        if whole:
            os.replace(partial, target)
        return whole
    except OSError as error:
        raise CachePackError(f"{target}: cannot be written: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def _copy(archive: zipfile.ZipFile, entry: Entry, target: IO[bytes] | None) -> bool:
    """Copy an entry's bytes, no more than the manifest says, and return whether they are the ones that it says."""
    digest, left = hashlib.sha256(), entry.bytes
    try:
        with archive.open(f"cache/{entry.path}") as source:
            while chunk := source.read(min(_CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    return False
                digest.update(chunk)
                if target is not None:
                    target.write(chunk)
    except (KeyError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        return False
    except OSError:
        if target is not None:
            raise
        return False
    return left == 0 and digest.hexdigest() == entry.sha256
