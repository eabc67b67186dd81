"""`train.py RECIPE --precompile`: fill the compile cache without training, and prove that the next run finds everything in it.

Two short runs of the recipe in processes of their own, of two steps with validation and without checkpoints. The first compiles
what is missing. The second must find all of it: what a cache says of itself in the process that filled it proves nothing. Under
a launcher each rank starts the two for itself, and they meet as ranks of one run do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.base import Backend
from recipes.base import Recipe, RecipeError
from training.compile_cache import REPOSITORY, graph_facts, remember_fill, require_usable
from training.record import RunFailed
from training.world import World

FOLDER = "precompiled"
"""Below run.output_dir. Their records are not among the runs: they trained nothing."""
_SHORT = {
    "--training.steps": "2",
    "--optimizer.warmup_steps": "0",
    "--checkpoint.every_steps": "0",
    "--run.profile": "none",
}
_OTHER_ATTEMPT = 1000
"""Added to torchrun's count of restarts: its store outlives the first run, and with it the keys of that run."""


def precompile(recipe: Recipe, backend: Backend, world: World, arguments: Sequence[str]) -> int:
    """Fill the cache, prove it, and return the exit code: that of the run which failed, or 0.

    Args:
        arguments: of train.py, without --precompile.

    Raises:
        RecipeError: if the recipe compiles nothing, or what it compiles is not kept.
        RunFailed: if the second run had to compile something after all.
    """
    _require_something_to_keep(recipe, backend)
    backend.set_environment()
    require_usable(backend)
    folder = Path(recipe.run.output_dir, FOLDER)
    short = [word for pair in _SHORT.items() for word in pair]
    if recipe.validation.every_steps:
        short += ["--validation.every_steps", "1"]
    command = [*_this_command(arguments), *arguments, *short, "--run.no_tensorboard", "--run.tracker", "none"]
    command += ["--checkpoint.no_export", "--run.output_dir", str(folder)]
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    for number, proof in enumerate(([], ["--compile.require_cached"])):
        if world.is_main:
            said = "what is not in the cache yet is compiled" if not number else "again, and everything must be in the cache"
            print(f"precompile: run {number + 1} of 2: {said}", flush=True)
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(attempt + number * _OTHER_ATTEMPT)} if world.size > 1 else {}
        code = _run([*command, *proof], os.environ | restarts)
        if code:
            return code
        if not number:
            directory = backend.compile_cache().directory
            if directory is not None and world.local_rank == 0:
                remember_fill(Path(directory), graph_facts(recipe, backend))
    if world.is_main:
        print(_result(folder), flush=True)
    return 0


def _require_something_to_keep(recipe: Recipe, backend: Backend) -> None:
    if recipe.checkpoint.resume is not None:
        raise RecipeError(f"--precompile: got --resume {recipe.checkpoint.resume}, but nothing is trained; drop one of the two")
    if recipe.run.mode == "eager" and not backend.compiles_eagerly:
        raise RecipeError(f"--precompile: nothing is compiled in eager mode on {backend.name}; add --run.mode compile")
    if recipe.run.mode == "compile" and recipe.compile.backend not in (None, backend.compile_backend):
        raise RecipeError(
            f"--precompile: compile.backend {recipe.compile.backend!r} keeps nothing, allowed: {backend.compile_backend}"
        )


def _this_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that this process was started with, up to its arguments."""
    given = [*sys.orig_argv]
    while given and given[-1] in (*arguments, "--precompile"):
        given.pop()
    started_as_program = len(given) > 1 and any(word.endswith("train.py") or word == "-m" for word in given)
    return given if started_as_program else [sys.executable, str(REPOSITORY / "train.py")]


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command to its end, and take it along if this process is stopped."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()


def _result(folder: Path) -> str:
    """Return what the two runs did, from their records.

    Raises:
        RunFailed: if something was compiled after the first step of the second.
    """
    first, second = (_record(path) for path in sorted(folder.glob("*/record.json"))[-2:])
    cache, before = second["compile"]["cache"], first["compile"]["cache"]
    if cache["misses"]:
        late = "; ".join(each["function"] for each in second["compile"]["late_compiles"]) or "not named by the device"
        raise RunFailed(f"precompile: {cache['misses']} graphs were compiled again after the first step: {late}")
    waits = [record["timing"]["first_step_seconds"] for record in (first, second)]
    return (
        f"precompiled: {before['misses']} graphs compiled, {cache['hits']} found again, none missing, in "
        f"{cache['after']['directory']}; first step {waits[0]:.1f} s, then {waits[1]:.1f} s"
    )


def _record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
