"""What to compare with: a run, an inventory or a git revision, and how its inventory is taken with today's preflight."""

from __future__ import annotations

import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from preflight.stored import ROOT, Stored
from recipes.base import RecipeError
from training.snapshot import NAME, unpack

INVENTORY = "inventory.json"
"""Where a run keeps its inventory, once somebody has asked for it."""
_SECONDS = 900.0


@dataclass(frozen=True)
class Older:
    """An older inventory, and how to take it again with one field changed."""

    name: str
    stored: Stored
    tree: Path | None
    """Its sources. None: they are not kept."""
    arguments: Sequence[str]

    def with_field(self, name: str, value: str) -> Stored | None:
        """Return its inventory with one field changed. None: without its sources nobody can know."""
        if self.tree is None:
            return None
        return take_in(self.tree, [*self.arguments, *_override(name, ast.literal_eval(value))])

    def edits(self, new: Path, files: Sequence[str]) -> list[str]:
        """Return how these files differ from those below `new`, as `file:line ...`. Comments and blank lines are left out."""
        if self.tree is None:
            return []
        return [edit for file in files for edit in _edits(file, _code_of(self.tree / file), _code_of(new / file))]


def _code_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _edits(file: str, old: list[str], new: list[str]) -> Iterator[str]:
    """Yield each run of changed lines by its first one."""
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        before, after = ([line.strip() for line in lines if _is_code(line)] for lines in (old[i1:i2], new[j1:j2]))
        if tag != "equal" and before != after:
            first = next((number for number in range(j1, j2) if _is_code(new[number])), j1) + 1
            yield f"{file}:{first} `{(before or ['nothing'])[0]}` -> `{(after or ['nothing'])[0]}`"


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


@contextmanager
def older(what: str, arguments: Sequence[str], output_dir: str) -> Iterator[Older]:
    """Find what the user wants to compare with.

    Args:
        what: a run's folder or id, a file that `--inventory` wrote, or a git revision.
        arguments: the recipe and its overrides, for a git revision.
        output_dir: where runs are, for an id.

    Raises:
        RecipeError: if it is none of these, or has neither an inventory nor sources.
    """
    path = next((path for path in (Path(what), Path(output_dir) / what) if path.exists()), None)
    with tempfile.TemporaryDirectory(prefix="preflight-") as temporary:
        tree = Path(temporary)
        if path is not None and path.is_dir():
            yield _of_run(path, tree)
        elif path is not None and path.suffix == ".json":
            try:
                yield Older(str(path), Stored.read(path), None, arguments)
            except ValueError as error:
                raise RecipeError(f"--against: {error}") from None
        else:
            check_out(what, tree)
            yield Older(what, take_in(tree, arguments), tree, arguments)


def inventory_of_run(folder: Path) -> Stored:
    """Return a run's inventory: the one it keeps, else the one that its sources give, which it then keeps.

    Raises:
        RecipeError: if it is not the folder of a run, or its sources are gone or cannot be rehearsed.
    """
    with tempfile.TemporaryDirectory(prefix="preflight-") as temporary:
        return _of_run(folder, Path(temporary)).stored


def _of_run(folder: Path, tree: Path) -> Older:
    try:
        arguments = json.loads((folder / "record.json").read_text(encoding="utf-8"))["identity"]["argv"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise RecipeError(f"--against: {folder} is not the folder of a run: {error}") from None
    if not (folder / NAME).is_file():
        raise RecipeError(f"--against: {folder} keeps no sources ({NAME}); compare with a git revision instead")
    unpack(folder / NAME, tree)
    kept = folder / INVENTORY
    try:
        stored = Stored.read(kept)
    except ValueError:  # nobody has asked yet, or an older version did
        stored = take_in(tree, arguments)
        stored.write(kept)
    return Older(folder.name, stored, tree, arguments)


def check_out(revision: str, tree: Path) -> None:
    """Write the sources of a git revision into a folder.

    Raises:
        RecipeError: if there is no such revision.
    """
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], capture_output=True, text=True)
    if known.returncode:
        raise RecipeError(f"--against: got {revision!r}; allowed: a run's folder or id, a file of --inventory, a git revision")
    archive = subprocess.run([*git, "archive", known.stdout.strip()], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        opened.extractall(tree, filter="data")


def take_in(tree: Path, arguments: Sequence[str]) -> Stored:
    """Take an inventory with other sources than these, in a process of its own.

    Raises:
        RecipeError: if those sources cannot be rehearsed.
    """
    shutil.rmtree(tree / "preflight", ignore_errors=True)
    shutil.copytree(ROOT / "preflight", tree / "preflight", ignore=shutil.ignore_patterns("__pycache__"))
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        output = Path(folder) / INVENTORY
        command = [sys.executable, "-m", "preflight", *arguments, "--inventory", str(output)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RecipeError(f"--against: its sources cannot be rehearsed with today's preflight: {last}")
        return Stored.read(output)


def _override(name: str, value: Any) -> list[str]:
    """Return the flags that set a field to a value."""
    if isinstance(value, bool):
        section, _, field = name.partition(".")
        return [f"--{section}.{field}" if value else f"--{section}.no_{field}"]
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [f"--{name}", *map(str, values)]
