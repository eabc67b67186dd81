"""Checkpoints in a folder or an object store: where they lie, which of them are complete, which may go. Torch-free.

A checkpoint is a folder `step-00000010`. Its marker, `complete.json`, is written last and lists every other file with its size
and SHA-256. A folder without a marker was never finished; one whose files are not what the marker says was damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from recipes.base import RecipeError

MARKER = "complete.json"
FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 1 << 22


class CheckpointError(RecipeError):
    """A checkpoint that is not there, not complete or not this run's."""


class Damaged(CheckpointError):
    """A checkpoint whose files are not what its marker says; the message names the file."""


@dataclass(frozen=True)
class Manifest:
    """What the marker says of its checkpoint."""

    step: int
    """Optimizer steps done."""
    run: str
    """Id of the run that wrote it."""
    created_utc: str
    recipe: dict[str, Any]
    """As resolved, section by section."""
    versions: dict[str, str | None]
    world_size: int
    layout: dict[str, Any]
    tokens_per_step: int
    data: dict[str, Any]
    """Place in the data, and tokens seen, of all ranks together."""
    loss: float | None = None
    """Of the last step that was read from the device. None: of none yet."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name: bytes and sha256."""
    format_version: int = FORMAT_VERSION

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Manifest:
        """Read a marker.

        Raises:
            ValueError: if it is not one, or of a format that this version does not know.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format_version") != FORMAT_VERSION:
            version = found.get("format_version") if isinstance(found, dict) else None
            raise ValueError(f"format_version {version!r}, allowed: {FORMAT_VERSION}")
        lacking = {item.name for item in fields(cls)} - set(found)
        if lacking:
            raise ValueError(f"lacks {', '.join(sorted(lacking))}")
        return cls(**{item.name: found[item.name] for item in fields(cls)})


class CheckpointStore:
    """The checkpoints of one run and of those that resumed it.

    Args:
        url: a local folder, or a URL of any file system that fsspec knows, for example s3://bucket/run.
    """

    def __init__(self, url: str):
        from fsspec.core import url_to_fs  # 50 ms, for runs that save only

        self.url = url.rstrip("/")
        try:
            self.files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:  # an unknown protocol, or one whose package is not installed
            raise CheckpointError(f"checkpoint.folder: got {url!r}, which cannot be opened: {error}") from None
        self.root: str = root.rstrip("/") or "/"
        self.is_local = "file" in _protocols(self.files)
        self.damaged: dict[int, str] = {}
        """Steps found damaged, with what is wrong. They count as incomplete from then on."""

    # --- what is there ------------------------------------------------------------------------------------------------

    def folder(self, step: int) -> str:
        """Where the checkpoint of a step lies, on this file system."""
        return posixpath.join(self.root, f"step-{step:08d}")

    def name(self, step: int) -> str:
        """The same, as a person would type it."""
        return f"{self.url}/step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, complete or not, newest first."""
        self.files.invalidate_cache()
        try:
            names = self.files.ls(self.root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = (_NAME.fullmatch(posixpath.basename(name.rstrip("/"))) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def read(self, step: int) -> Manifest | None:
        """Return what the marker of a step says. None: there is none, so it was never finished.

        Raises:
            Damaged: if there is one and it cannot be read, or a file that it lists is missing or has another size.
        """
        path = posixpath.join(self.folder(step), MARKER)
        try:
            manifest = Manifest.parse(self.files.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, TypeError) as error:
            raise Damaged(f"{self.name(step)}/{MARKER}: {error}") from None
        except OSError as error:
            raise Damaged(f"{self.name(step)}/{MARKER}: {error.strerror or error}") from None
        sizes = {posixpath.basename(entry["name"]): entry["size"] for entry in self.files.ls(self.folder(step), detail=True)}
        for name, file in manifest.files.items():
            if name not in sizes:
                raise Damaged(f"{self.name(step)}/{name}: missing, although {MARKER} lists it")
            if sizes[name] != file["bytes"]:
                raise Damaged(f"{self.name(step)}/{name}: {sizes[name]} bytes, should be {file['bytes']}")
        return manifest

    def verify(self, step: int, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
        """Read every `shares`-th file whole and hold it against its checksum.

        Raises:
            Damaged: naming the first file that differs or cannot be read.
        """
        for name in sorted(manifest.files)[share::shares]:
            path, digest = posixpath.join(self.folder(step), name), hashlib.sha256()
            try:
                with self.files.open(path, "rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
            except OSError as error:
                raise Damaged(f"{self.name(step)}/{name}: {error.strerror or error}") from None
            if digest.hexdigest() != manifest.files[name]["sha256"]:
                raise Damaged(f"{self.name(step)}/{name}: damaged, its SHA-256 is not what {MARKER} says")

    def candidates(self, notify: Callable[[str], None]) -> Iterator[Manifest]:
        """Yield the checkpoints that look complete, newest first; skip the others by name."""
        for step in self.steps():
            try:
                manifest = self.read(step)
            except Damaged as error:
                self.damaged[step] = str(error)
                notify(f"checkpoint skipped: {error}")
                continue
            if manifest is None:
                notify(f"checkpoint skipped: {self.name(step)} was never finished (it has no {MARKER})")
            else:
                yield manifest

    def complete_steps(self) -> list[int]:
        """Steps with a marker and not known to be damaged, newest first."""
        return [
            step
            for step in self.steps()
            if step not in self.damaged and self.files.exists(posixpath.join(self.folder(step), MARKER))
        ]

    # --- what changes -------------------------------------------------------------------------------------------------

    def mark_complete(self, manifest: Manifest) -> None:
        """Write the marker: from here on the checkpoint counts, also after a power failure."""
        folder = self.folder(manifest.step)
        path, text = posixpath.join(folder, MARKER), manifest.text().encode("ascii")
        if not self.is_local:
            self.files.pipe_file(path, text)  # an object appears whole or not at all
        else:
            with open(f"{path}.partial", "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.partial", path)
            for name in (folder, self.root):
                _sync_folder(name)
        self.damaged.pop(manifest.step, None)

    def withdraw(self, step: int) -> None:
        """Delete a checkpoint, its marker first, so that what a crash leaves of it does not count."""
        folder = self.folder(step)
        marker = posixpath.join(folder, MARKER)
        if self.files.exists(marker):
            self.files.rm_file(marker)
        if self.files.exists(folder):
            self.files.rm(folder, recursive=True)
        self.damaged.pop(step, None)

    def retire(self, keep_last: int, keep_every_steps: int = 0) -> list[int]:
        """Delete what the newest complete checkpoint makes superfluous, and every incomplete one. Return the steps deleted.

        Args:
            keep_last: complete checkpoints that stay, at least 1.
            keep_every_steps: those of every n-th step stay for ever. 0: none do.
        """
        complete = self.complete_steps()
        if not complete:
            return []
        kept = {*complete[:keep_last], *(step for step in complete if keep_every_steps and step % keep_every_steps == 0)}
        gone = [step for step in self.steps() if step not in kept]
        for step in gone:
            self.withdraw(step)
        return gone

    def free_bytes(self) -> int | None:
        """Space left for a new checkpoint. None: an object store, which has no end that could be asked for."""
        if not self.is_local:
            return None
        place = self.root
        while not os.path.exists(place):
            place = os.path.dirname(place)
        return shutil.disk_usage(place).free


def _protocols(files: Any) -> Iterable[str]:
    return (files.protocol,) if isinstance(files.protocol, str) else files.protocol


def _sync_folder(folder: str) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
