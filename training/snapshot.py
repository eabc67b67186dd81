"""The sources of a run, kept in its folder: what ran can be looked at, and rehearsed again, after the next edit."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

NAME = "sources.zip"
FOLDERS = ("recipes", "models", "backends", "training")
"""With train.py, all that a run imports of the project."""


def source_files(root: Path) -> Iterator[Path]:
    """Yield the files of the project that take part in a run, in a fixed order."""
    if (root / "train.py").is_file():
        yield root / "train.py"
    for folder in FOLDERS:
        yield from sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".json"))


def write_snapshot(root: Path, folder: Path) -> Path:
    """Write the sources into one archive, about 100 kB, and return its path."""
    path = folder / NAME
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in source_files(root):
            archive.write(file, file.relative_to(root))
    return path


def unpack(archive: Path, folder: Path) -> None:
    """Write the sources of a run into a folder."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
