"""The wait before the first step of one recipe: forecasts by state of the cache, the time-out they ask for, advice."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backends.system import installed_version
from models import model_config
from preflight import forecast
from preflight.forecast import COLD, WARM, BreakEven, PastRun, Seconds
from preflight.stored import Stored
from preflight.trees import inventory_of_run
from recipes import command_line
from recipes.base import Published, Recipe, RecipeError
from training.flops import count_flops

_ASKED_RUNS, _AT_ONCE = 5, 2
"""Newest compiled runs whose graphs are looked at, and how many are rehearsed at a time if they keep no inventory yet."""
TIMEOUT_FACTOR = 2.0
"""How much longer than its forecast a first step may take before it is given up."""


@dataclass(frozen=True)
class Outlook:
    """How long until the first step is done, and which mode gets further."""

    history: int
    """Past runs of this machine on the device, in either mode."""
    cold: Seconds
    warm: Seconds
    as_is: Seconds
    """With the cache as it is now."""
    published: dict[str, float]
    """First steps that others have published for the device: recipe and seconds. A bracket where there is no history."""
    longest_seconds: float | None
    """The longest that any of these leads to expect."""
    timeout_seconds: float
    """What the recipe allows."""
    timeout_is_enough: bool | None
    break_even: BreakEven | None
    advice: str


def outlook(recipe: Recipe, stored: Stored, published: Published | None, cache_is_empty: bool) -> Outlook:
    """Work out the wait.

    Args:
        stored: the recipe's inventory.
        published: somebody's figures for exactly this work.
        cache_is_empty: as far as is known.
    """
    mode, device = recipe.run.mode, recipe.run.device
    runs, inventories = history(recipe)
    graphs, flops, known = stored.inventory.graphs, model_flops(recipe), set[str]()
    if not cache_is_empty:
        for other in inventories:
            known |= set(other.inventory.distinct) if other.settings == stored.settings else set()
    waits = {
        COLD: forecast.first_step(graphs, flops, runs, mode, COLD),
        WARM: forecast.first_step(graphs, flops, runs, mode, WARM),
        "as is": forecast.first_step(graphs, flops, runs, mode, COLD, known),
    }
    others = _published_first_steps(device)
    expected = [wait.high for wait in waits.values() if wait.high is not None]
    longest = max(expected, default=max(others.values(), default=None))
    found = _break_even(recipe, runs, published)
    timeout = recipe.comm.first_step_timeout_seconds
    return Outlook(
        history=len(runs),
        cold=waits[COLD],
        warm=waits[WARM],
        as_is=waits["as is"],
        published=others,
        longest_seconds=longest,
        timeout_seconds=timeout,
        timeout_is_enough=None if longest is None else timeout >= TIMEOUT_FACTOR * longest,
        break_even=found,
        advice=_advice(recipe, found),
    )


def longest_known_first_step(recipe: Recipe) -> tuple[float | None, str]:
    """Return the longest first step on the recipe's device and whose it is: of this machine's runs, else published."""
    device = recipe.run.device
    runs = forecast.read_runs(Path(recipe.run.output_dir), device, socket.gethostname(), {})
    if runs:
        longest = max(runs, key=lambda run: run.first_step_seconds)
        return longest.first_step_seconds, f"run {longest.id}"
    others = _published_first_steps(device)
    name = max(others, key=lambda name: others[name], default=None)
    return (None, "") if name is None else (others[name], f"published, {name}")


def model_flops(recipe: Recipe) -> float | None:
    """Return one rank's share of the model's FLOPs in a step."""
    config = model_config(recipe.model, recipe.training.seq_len, recipe.parallel.tensor_parallel_degree)
    flops, ranks = count_flops(config, recipe.training.seq_len).flops_per_token, recipe.parallel.ranks
    return None if flops is None else flops * recipe.tokens_per_step(ranks) / ranks


def history(recipe: Recipe) -> tuple[list[PastRun], list[Stored]]:
    """Return this machine's runs on the recipe's device, oldest first, and the inventories of the newest compiled ones.

    Those compiled runs know how large their graphs were. An inventory is taken once and then kept with its run.
    """
    versions = {"torch": installed_version("torch"), "torch-neuronx": installed_version("torch-neuronx")}
    folder = Path(recipe.run.output_dir)
    runs = forecast.read_runs(folder, recipe.run.device, socket.gethostname(), versions)
    newest = [index for index, run in enumerate(runs) if run.mode == "compile"][-_ASKED_RUNS:]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        inventories = list(threads.map(lambda index: _inventory(folder / runs[index].id), newest))
    for index, stored in zip(newest, inventories, strict=True):
        if stored is not None:
            runs[index] = runs[index].with_graphs(stored.inventory.graphs)
    return runs, [stored for stored in inventories if stored is not None]


def _inventory(folder: Path) -> Stored | None:
    try:
        return inventory_of_run(folder)
    except RecipeError:
        return None  # its sources are gone or cannot be rehearsed any more: nothing is known of its graphs


def _published_first_steps(device: str) -> dict[str, float]:
    recipes = [recipe for recipe in map(command_line.load, command_line.names()) if recipe.run.device == device]
    return {recipe.name: recipe.published.first_step_seconds for recipe in recipes if recipe.published}


def _break_even(recipe: Recipe, runs: Sequence[PastRun], published: Published | None) -> BreakEven | None:
    """Compare the modes on this machine's own runs of the same work, else on published ones."""
    ranks, steps = recipe.parallel.ranks, recipe.training.steps
    work = forecast.work_of(dataclasses.asdict(recipe), ranks)
    measured = {
        run.mode: run for run in runs if run.work == work and run.steady_seconds and run.cache_state in (COLD, None)
    }  # the newest of each mode
    if set(measured) == {"eager", "compile"}:
        first = {mode: run.first_step_seconds for mode, run in measured.items()}
        steady = {mode: run.steady_seconds or 0.0 for mode, run in measured.items()}
        return forecast.break_even(first, steady, steps, "this machine's own runs, cold cache")
    if published is None:
        return None
    figures = {}
    for other in map(command_line.load, command_line.names()):
        same = (other.model, other.training, other.run.device) == (recipe.model, _same_steps(recipe, other), recipe.run.device)
        if other.published and same:
            figures[other.run.mode] = other.published
    if set(figures) != {"eager", "compile"}:
        return None
    first = {mode: figure.first_step_seconds for mode, figure in figures.items()}
    steady = {mode: recipe.tokens_per_step(ranks) / figure.tokens_per_second for mode, figure in figures.items()}
    return forecast.break_even(first, steady, steps, "published figures")


def _same_steps(recipe: Recipe, other: Recipe):
    return dataclasses.replace(recipe.training, steps=other.training.steps)


def _advice(recipe: Recipe, found: BreakEven | None) -> str:
    if found is not None:
        return forecast.advice(found, recipe.training.steps)
    return "eager or compile: n/a, this machine has no runs of this work in both modes and nobody has published any"
