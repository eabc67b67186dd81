"""What the operating system and the installed packages say of themselves."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def installed_version(package: str) -> str | None:
    """The version of an installed distribution. None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_text(path: Path) -> str | None:
    """The text of a file in which the system describes itself. None: there is no such file here."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
