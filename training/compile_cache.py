"""The compile cache around a run: whether it can be used at all, and what differs from the run that filled it. Torch-free."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.base import Backend
from recipes.base import Recipe, RecipeError
from training.record import RunFailed, git_state

REPOSITORY = Path(__file__).parent.parent
FILLED = ".filled.json"
"""In the cache's folder: what the launches were that filled it with --precompile, newest last."""
_MOST_FILLS = 50
_NO_GRAPH = ("run", "checkpoint", "validation", "comm", "health", "published", "name", "description")
"""Parts of a recipe that decide no graph, but for the fields of `run` below."""
_OF_RUN = ("device", "mode", "deterministic")
_NO_GRAPH_FIELDS = ("training.steps", "compile.require_cached")


def require_usable(backend: Backend) -> None:
    """Return if the cache's folder, where a variable names one, can be written.

    Raises:
        RecipeError: if it cannot: every start would compile everything again, and nothing would say why.
    """
    variable = backend.compile_cache_variable
    directory = None if variable is None else os.environ.get(variable)
    if not directory:
        return
    if "://" in directory:
        raise RecipeError(
            f"{variable}: got {directory!r}, allowed: a folder; carry a cache over with `python -m ledger cache pack`, `unpack`"
        )
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        probe = Path(directory, f".{secrets.token_hex(4)}.partial")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RecipeError(
            f"{variable}: got {directory!r}, where compiled graphs cannot be kept ({error.strerror}); name another folder, or "
            "unset it"
        ) from None


def graph_facts(recipe: Recipe, backend: Backend) -> dict[str, Any]:
    """Return what decides the graphs of a launch: fields of the recipe, versions and flags, and the code."""
    facts: dict[str, Any] = {}
    for section, values in asdict(recipe).items():
        if isinstance(values, dict) and section not in _NO_GRAPH:
            facts |= {f"{section}.{name}": value for name, value in values.items()}
    facts |= {f"run.{name}": getattr(recipe.run, name) for name in _OF_RUN}
    facts |= backend.compile_settings()
    facts["code"] = git_state(REPOSITORY)[0]
    return {name: value for name, value in facts.items() if name not in _NO_GRAPH_FIELDS}


def remember_fill(directory: Path, facts: dict[str, Any]) -> None:
    """Write down what the cache has been filled for."""
    fills = [*_fills(directory), json.loads(json.dumps(facts))][-_MOST_FILLS:]
    partial = directory / f"{FILLED}.{secrets.token_hex(4)}.partial"
    partial.write_text(json.dumps(fills), encoding="utf-8")
    os.replace(partial, directory / FILLED)


def what_differs(directory: Path | None, facts: dict[str, Any]) -> str:
    """Say what differs from the most similar of the launches that the cache was filled for."""
    facts = json.loads(json.dumps(facts))
    fills = [] if directory is None else _fills(directory)
    if not fills:
        return f"{directory} has not been filled by `train.py RECIPE --precompile`"
    differing = [
        [
            f"{name} was {fill.get(name)!r}, is {facts.get(name)!r}"
            for name in sorted(fill.keys() | facts.keys())
            if fill.get(name) != facts.get(name)
        ]
        for fill in reversed(fills)
    ]
    nearest = min(differing, key=len)
    return "; ".join(nearest) if nearest else "recipe, versions, flags and commit are those that it was filled for"


def require_cached(uses: Sequence[tuple[int | None, int | None]], directory: str | None, facts: dict[str, Any]) -> None:
    """Return if every rank found all that it needed.

    Args:
        uses: hits and misses of each rank.
        facts: what graph_facts gives for this launch.

    Raises:
        RunFailed: if something was compiled, or it cannot be told.
    """
    if any(None in use for use in uses):
        raise RunFailed("compile.require_cached: the device does not count what it compiles, so it cannot be told")
    hits, misses = (sum(counts) for counts in zip(*uses, strict=True))
    if misses:
        reason = what_differs(None if directory is None else Path(directory), facts)
        raise RunFailed(f"compile.require_cached: {misses} graphs were compiled that the cache did not have: {reason}")
    if not hits:
        raise RunFailed("compile.require_cached: the compile cache was not asked for anything; is it switched off?")


def _fills(directory: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        found = json.loads((directory / FILLED).read_text(encoding="utf-8"))
        if isinstance(found, list):
            return [fill for fill in found if isinstance(fill, dict)]
    return []
