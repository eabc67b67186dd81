"""A list of launches: which graphs each of them adds to the cache, and how long all of that compiles."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from preflight import forecast
from preflight.outlook import history, model_flops
from preflight.stored import parse, take
from recipes.base import RecipeError


@dataclass(frozen=True)
class Launch:
    """One line of a campaign."""

    command: str
    graphs: int
    """Distinct graphs that it needs."""
    new_graphs: int
    """Those that no launch before it has compiled."""
    first_step_seconds: float | None
    """With what the launches before it have left in the cache. None: this machine has no history to tell from."""


@dataclass(frozen=True)
class Plan:
    """A whole campaign."""

    launches: list[Launch]
    new_graphs: int
    """Graphs that are compiled in all, starting from an empty cache."""
    waiting_seconds: float | None
    """All first steps together. None: one of them is not known."""


def read_launches(file: Path) -> list[str]:
    """Return the launches of a file; blank lines and those that begin with # are left out.

    Raises:
        RecipeError: if it cannot be read or has none.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--campaign: {file} cannot be read: {error}") from None
    launches = [line for line in lines if line and not line.startswith("#")]
    if not launches:
        raise RecipeError(f"--campaign: {file} has no launches; write one `RECIPE [overrides]` a line")
    return launches


def plan(launches: Sequence[str], progress: Callable[[str], None] = lambda text: None) -> Plan:
    """Rehearse the launches in their order.

    Raises:
        RecipeError: for the first one that is not a recipe with its overrides.
    """
    recipes = []
    for launch in launches:
        try:
            recipe = parse(shlex.split(launch))
            recipe.check(recipe.parallel.ranks)
        except (RecipeError, AssertionError, ValueError) as error:
            raise RecipeError(f"--campaign: `{launch}`: {error}") from None
        recipes.append(recipe)
    found, known = [], set[str]()
    for launch, recipe in zip(launches, recipes, strict=True):
        progress(launch)
        graphs = take(recipe).inventory.graphs
        runs, _ = history(recipe)
        wait = forecast.first_step(graphs, model_flops(recipe), runs, recipe.run.mode, forecast.COLD, known)
        needed = {graph.fingerprint for graph in graphs}
        found.append(Launch(launch, len(needed), len(needed - known), wait.seconds))
        known |= needed
    waits = [launch.first_step_seconds for launch in found]
    waiting = None if None in waits else sum(wait for wait in waits if wait is not None)
    return Plan(found, sum(launch.new_graphs for launch in found), waiting)
