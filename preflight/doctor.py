"""Is this machine ready for a recipe: one line for each thing that has kept somebody's run from starting, with its fix."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from backends import BackendUnavailable, get_backend
from backends.base import Backend
from backends.checks import Check
from backends.system import installed_version
from recipes import command_line
from recipes.base import Recipe, RecipeError

_TORCH = ((2, 13), (2, 15))
"""Versions that torch-neuronx pairs with: from the first to before the second."""
_CACHE_BYTES, _RUN_BYTES = 20 * 2**30, 5 * 2**30
"""Free space worth having for compiled graphs, and for a run's folder."""
_REMOTE = ("nfs", "nfs4", "lustre", "fuse.s3fs", "fuse.mount-s3", "efs", "cifs", "ceph", "beegfs", "gpfs", "9p", "virtiofs")
"""File systems that several machines can share."""


def examine(recipe: Recipe, instance: str | None = None) -> list[Check]:
    """Look at this machine with a recipe in mind.

    Args:
        instance: type of another machine whose cores are meant. None: this one's.
    """
    backend = get_backend(recipe.run.device)
    return [
        *_software(backend),
        *_device(backend, recipe, instance),
        *_folders(backend, recipe),
        _timeout(recipe),
        *_data(recipe),
        _clock(),
    ]


def _software(backend: Backend) -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    oldest = getattr(backend, "oldest_python", (3, 11))
    if sys.version_info[:2] < oldest:
        wanted = ".".join(map(str, oldest))
        yield Check("python", "failure", f"{python}, {backend.name} needs {wanted} or later", f"use Python {wanted}")
    else:
        yield Check("python", "ok", python)
    torch = installed_version("torch")
    if torch is None:
        yield Check("torch", "failure", "not installed", "pip install -c constraints.txt .")
        return
    version = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
    first, last = (".".join(map(str, bound)) for bound in _TORCH)
    if _TORCH[0] <= version < _TORCH[1]:
        yield Check("torch", "ok", torch)
    else:
        yield Check(
            "torch", "failure", f"{torch}, allowed: {first} or later, before {last}", f"pip install 'torch>={first},<{last}'"
        )


def _device(backend: Backend, recipe: Recipe, instance: str | None) -> Iterator[Check]:
    try:
        backend.require()
        facts = {name: value for name, value in backend.describe().items() if isinstance(value, (str, int)) and value}
        yield Check(backend.name, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))
    except BackendUnavailable as error:
        text, _, fix = str(error).partition(". ")
        yield Check(backend.name, "failure", text, fix or "use --run.device cpu")
    hosts = int(os.environ.get("NNODES", "1"))
    yield from backend.machine_checks(recipe.parallel.ranks // hosts, recipe.run.chip, instance)


def _folders(backend: Backend, recipe: Recipe) -> Iterator[Check]:
    backend.set_environment()
    try:
        directory = backend.compile_cache().directory
    except ImportError:  # without torch there is no cache either, and that has been said
        directory = None
    if directory is None:
        yield Check("cache", "warning", "the compile cache's folder is not known")
    else:
        yield _folder("cache", Path(directory), _CACHE_BYTES, "compiled graphs")
    yield _folder("runs", Path(recipe.run.output_dir), _RUN_BYTES, "records and checkpoints")


def _folder(name: str, folder: Path, wanted: int, what: str) -> Check:
    """Look at a folder that will be written: there or not, writable, on which file system, with how much space."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "failure", f"{folder}: {there} is not writable", "make it writable, or choose another folder")
    kind, free = _file_system(there), shutil.disk_usage(there).free
    shared = "shared by machines" if kind in _REMOTE else "of this machine alone"
    state = "exists" if there == folder.absolute() else "will be made"
    text = f"{folder} for {what}: {state}, {kind or 'unknown file system'} ({shared}), {free / 2**30:.0f} GiB free"
    if free < wanted:
        return Check(name, "warning", text, f"have {wanted / 2**30:.0f} GiB free")
    return Check(name, "ok", text)


def _file_system(folder: Path) -> str | None:
    """Return the type of the file system that a folder is on. None: not Linux."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    holders = [(len(mount[1]), mount[2]) for mount in mounts if folder.is_relative_to(mount[1].replace("\\040", " "))]
    return max(holders)[1] if holders else None


def _timeout(recipe: Recipe) -> Check:
    from preflight.outlook import TIMEOUT_FACTOR, longest_known_first_step

    allowed = recipe.comm.first_step_timeout_seconds
    longest, source = longest_known_first_step(recipe)
    if longest is None:
        return Check("time-out", "ok", f"{allowed:.0f} s for the first step; no first step is known to compare it with")
    text = f"{allowed:.0f} s for the first step; the longest known took {longest:.1f} s ({source})"
    if allowed < TIMEOUT_FACTOR * longest:
        return Check("time-out", "warning", text, f"--comm.first_step_timeout_seconds {TIMEOUT_FACTOR * longest:.0f}")
    return Check("time-out", "ok", text)


def _data(recipe: Recipe) -> Iterator[Check]:
    try:
        from training.sources import open_source
        from training.tokenizer import load_tokenizer
    except ImportError as error:
        yield Check("data", "failure", f"cannot be read: {error}", "pip install -c constraints.txt .")
        return
    for name, look in (
        ("tokenizer", lambda: load_tokenizer(recipe.data, lambda text: None)),
        ("data", lambda: open_source(recipe.data)),
    ):
        try:
            look()
            what = recipe.data.tokenizer or "trained on the text itself" if name == "tokenizer" else recipe.data.path
            yield Check(name, "ok", str(what or recipe.data.source))
        except RecipeError as error:
            text, _, fix = str(error).rpartition("; ")
            yield Check(name, "failure", text or str(error), fix)


def _clock() -> Check:
    """Compare the clock with the newest file of the project, which cannot be from the future."""
    newest = max(path.stat().st_mtime for path in Path(__file__).parent.glob("*.py"))
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if newest > now + 60:
        fix = "set the clock (timedatectl): records and download certificates depend on it"
        return Check("clock", "failure", f"{text}, earlier than a file of this project", fix)
    return Check("clock", "ok", text)


def default_recipe() -> Recipe:
    """Return the recipe that is examined when none is named."""
    return command_line.load("debug")
