"""python -m preflight: its own flags, and what they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from backends import BackendUnavailable
from recipes import command_line
from recipes.base import Recipe, RecipeError

USAGE = """usage: python -m preflight RECIPE [--section.field VALUE ...] [--tiny] [--json] [--against WHAT] [--inventory FILE]
       python -m preflight --doctor [RECIPE ...] [--instance TYPE]
       python -m preflight --campaign FILE

Find out what a recipe needs, compiles and waits for, before it is launched. Needs no accelerator.

  --json            the same as data
  --against WHAT    which graphs compile again since a run (folder or id), an inventory or a git revision, and why
  --inventory FILE  write what the recipe compiles into FILE, and nothing else
  --doctor          is this machine ready; --instance TYPE: are the cores of another one, for example trn2.3xlarge
  --campaign FILE   which graphs a list of launches compiles in all: one `RECIPE [overrides]` a line
  --tiny, --section.field VALUE   as for train.py; `python train.py RECIPE --help` lists every field"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    try:
        return _run(list(arguments))
    except (RecipeError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    as_json = _take_flag(arguments, "--json")
    if _take_flag(arguments, "--doctor"):
        return _examine(arguments, as_json)
    if (campaign := _take_value(arguments, "--campaign")) is not None:
        return _plan(Path(campaign), as_json)
    against, inventory = _take_value(arguments, "--against"), _take_value(arguments, "--inventory")
    recipe = _recipe(arguments)
    if recipe is None:
        return 0
    if inventory is not None:
        from preflight.stored import take

        take(recipe).write(Path(inventory))
        return 0
    if against is not None:
        return _compare(recipe, arguments, against, as_json)
    return _study(recipe, as_json)


def _recipe(arguments: Sequence[str]) -> Recipe | None:
    if not arguments:
        raise RecipeError("name a recipe: python -m preflight RECIPE ...; see `python -m preflight --help`")
    parsed = command_line.parse(arguments)
    if parsed is None:
        return None
    recipe = parsed[0]
    recipe.check(recipe.parallel.ranks)
    return recipe


def _study(recipe: Recipe, as_json: bool) -> int:
    from preflight.screen import as_data, show
    from preflight.study import study

    with _progress() as status:
        found = study(recipe, lambda what: None if status is None else status.update(f"rehearsing {recipe.name}: {what}"))
    if as_json:
        print(json.dumps(as_data(found), indent=1))
    else:
        show(found, Console(highlight=False))
    return 1 if any(choice.is_chosen and choice.fits is False for choice in found.choices) else 0


def _compare(recipe: Recipe, arguments: Sequence[str], what: str, as_json: bool) -> int:
    from dataclasses import asdict

    from preflight.against import compare, find_causes
    from preflight.screen import show_comparison
    from preflight.stored import ROOT, take
    from preflight.trees import older

    with _progress() as status, older(what, arguments, recipe.run.output_dir) as old:
        if status is not None:
            status.update(f"rehearsing {recipe.name}")
        new = take(recipe)
        comparison = compare(old.stored, new)
        edits = old.edits(ROOT, comparison.changed_sources)
        find_causes(comparison, old.stored, new, old.with_field, edits)
    if as_json:
        print(json.dumps({"verdict": comparison.verdict, **asdict(comparison)}, indent=1))
    else:
        show_comparison(comparison, old.name, Console(highlight=False))
    return 0


def _examine(arguments: list[str], as_json: bool) -> int:
    from dataclasses import asdict

    from backends.neuron_cores import CHIPS_OF
    from preflight.doctor import default_recipe, examine
    from preflight.screen import show_checks

    instance = _take_value(arguments, "--instance")
    if instance is not None and instance not in CHIPS_OF:
        raise RecipeError(f"--instance: got {instance!r}, allowed: {', '.join(CHIPS_OF)}")
    recipe = _recipe(arguments) if arguments else default_recipe()
    if recipe is None:
        return 0
    checks = examine(recipe, instance)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        show_checks(checks, Console(highlight=False))
    return 1 if any(check.status == "failure" for check in checks) else 0


def _plan(file: Path, as_json: bool) -> int:
    from dataclasses import asdict

    from preflight.campaign import plan, read_launches
    from preflight.screen import show_plan

    with _progress() as status:
        found = plan(read_launches(file), lambda what: None if status is None else status.update(f"rehearsing {what}"))
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show_plan(found, Console(highlight=False))
    return 0


def _progress():
    """Return a line on standard error that changes while work goes on; where nobody watches, nothing."""
    console = Console(stderr=True)
    return console.status("rehearsing") if console.is_terminal else nullcontext(None)


def _take_flag(arguments: list[str], flag: str) -> bool:
    found = flag in arguments
    if found:
        arguments.remove(flag)
    return found


def _take_value(arguments: list[str], flag: str) -> str | None:
    """Remove `flag VALUE` or `flag=VALUE` and return the value."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            if not equals and (index + 1 == len(arguments) or arguments[index + 1].startswith("--")):
                raise RecipeError(f"{flag} needs a value; see `python -m preflight --help`")
            taken = arguments[index : index + (1 if equals else 2)]
            del arguments[index : index + len(taken)]
            return value if equals else taken[1]
    return None
