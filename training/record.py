"""The run record: one folder per run, written from the first moment, so that failed runs and their cost are counted too."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.base import Recipe, RecipeError
from training.snapshot import write_snapshot
from training.strays import own_process
from training.tracker import require_tracker
from training.world import launch_id

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).with_name("record.schema.json")
_PACKAGES = ("torch", "torch-neuronx", "transformers", "datasets", "tokenizers", "safetensors", "torchtitan")


class RunFailed(RuntimeError):
    """The run cannot go on for a reason that one sentence explains; the record keeps it as the cause."""


class RunRecord:
    """`record.json`, `steps.jsonl`, `environment.txt` and `sources.zip` of one run.

    `record.json` says `running` from the start and is replaced atomically, so a reader never sees half of it.
    """

    def __init__(
        self,
        recipe: Recipe,
        argv: Sequence[str],
        repository: Path,
        name: str | None = None,
        *,
        writes: bool = True,
        checkpoints: Mapping[str, Any] | None = None,
    ):
        """Create the run's folder and its first record.

        Args:
            name: what `run_name` gave. All ranks of a run have the same.
            writes: False on the ranks that only need to know the folder.
            checkpoints: where the run will save and what it goes on from; None: it does not say yet.

        Raises:
            RecipeError: if the folder cannot be written, or a tracker is asked for that is not installed.
        """
        require_tracker(recipe.run.tracker)
        name, self.writes = name or run_name(recipe), writes
        self.folder = Path(recipe.run.output_dir) / name
        self._lock = threading.Lock()
        self.content: dict[str, Any] = {}
        if not writes:
            return
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise RecipeError(f"run.output_dir: got {recipe.run.output_dir!r}, which cannot be written: {error}") from None
        commit, dirty = git_state(repository)
        self.content = {
            "schema_version": SCHEMA_VERSION,
            "id": name,
            "status": "running",
            "cause": None,
            "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "finished_utc": None,
            "identity": {
                "recipe": asdict(recipe),
                "argv": list(argv),
                "git_commit": commit,
                "git_dirty": dirty,
                "launch": launch_id(),
                "process": own_process(),
            },
        }
        if checkpoints is not None:
            self.content["checkpoints"] = dict(checkpoints)
        self.write()
        write_snapshot(repository, self.folder)
        self._steps = (self.folder / "steps.jsonl").open("a", encoding="ascii")

    def update(self, **sections: Any) -> None:
        """Set sections of the record and write it. Dataclasses become objects; NaN and infinities become null."""
        self.content.update(sections)
        self.write()

    def write(self) -> None:
        """Replace record.json in one move."""
        if not self.writes:
            return
        with self._lock:  # the watchdog closes the record where the main thread cannot
            text = json.dumps(_plain(self.content), indent=2, allow_nan=False)
            unfinished = self.folder / ".record.json.partial"
            unfinished.write_text(text + "\n", encoding="ascii")
            os.replace(unfinished, self.folder / "record.json")

    def append_steps(self, steps: Sequence[Any]) -> None:
        """Add one line per optimizer step (training.metrics.Step) to steps.jsonl, with the time at which it was known."""
        if not self.writes:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        for step in steps:
            self._steps.write(json.dumps(_plain(step) | {"written_utc": now}, allow_nan=False) + "\n")
        self._steps.flush()

    def finish(self, status: str, cause: str | None = None) -> None:
        """Close the record.

        Args:
            status: finished, failed or interrupted.
        """
        if self.writes:
            self._steps.close()
        self.update(status=status, cause=cause, finished_utc=datetime.now(UTC).isoformat(timespec="seconds"))

    def write_environment(self) -> None:
        """Write the name and version of every installed distribution."""
        if not self.writes:
            return
        lines = sorted(f"{dist.metadata['Name']}=={dist.version}" for dist in metadata.distributions())
        (self.folder / "environment.txt").write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")


def run_name(recipe: Recipe) -> str:
    """Return a new name for a run: when it started, its recipe, and a few random letters."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{recipe.name}-{secrets.token_hex(3)}"


def software() -> dict[str, Any]:
    """Return interpreter, system and package versions."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "executable": sys.executable,
        "packages": package_versions(),
    }


@cache
def package_versions() -> dict[str, str | None]:
    """Return the versions of the packages that a run depends on. One that is not installed is None."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def git_state(repository: Path) -> tuple[str | None, bool | None]:
    """Return the commit checked out and whether the tree differs from it; None without git."""
    try:
        run = [
            subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, timeout=10, check=True)
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None, None
    return run[0].stdout.strip(), bool(run[1].stdout.strip())


def _plain(value: Any) -> Any:
    """Return `value` as JSON types; a number that is not finite has no JSON form and becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {name: getattr(value, name) for name in vars(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value
