"""The command line: a recipe by name, then overrides by field. Torch-free, so that it answers at once."""

from __future__ import annotations

import difflib
import importlib
import io
import pkgutil
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from recipes.base import Recipe, RecipeError

USAGE = (
    "usage: python train.py RECIPE [--section.field VALUE ...] [--resume [PATH]] [--tiny] [--dry-run] [--precompile] [--help]"
)
_NOT_RECIPES = ("base", "durability", "rules", "command_line")


def names() -> list[str]:
    """Return the name of every recipe: the files of this folder that are not machinery."""
    folder = importlib.import_module("recipes").__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if module.name not in _NOT_RECIPES)


def load(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        RecipeError: naming the nearest recipes if there is none.
    """
    if name not in names():
        if name.endswith((".toml", ".yaml", ".yml", ".json", ".py")):
            fix = "write recipes/<name>.py and run `python train.py <name>`"
            raise RecipeError(f"a recipe is a name, not a file: got {name!r}; {fix}")
        raise RecipeError(f"unknown recipe {name!r}{_nearest(name, names())}; allowed: {', '.join(names())}")
    recipe = importlib.import_module(f"recipes.{name}").RECIPE
    if recipe.name != name:
        raise RecipeError(f"recipes/{name}.py calls its recipe {recipe.name!r}; a recipe is named like its file")
    return recipe


def parse(arguments: Sequence[str]) -> tuple[Recipe, bool] | None:
    """Return the recipe with its overrides, and whether only to show it. None: help was asked for and printed.

    Raises:
        RecipeError: for an unknown recipe or flag or a value that does not fit, in one line.
    """
    arguments = list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print_overview()
        return None
    name, *overrides = arguments
    if name.startswith("-"):
        raise RecipeError(f"the recipe comes first: got {name!r}; {USAGE}")
    recipe = load(name)
    dry_run = "--dry-run" in overrides
    if "--tiny" in overrides:
        recipe = recipe.tiny()
    overrides = _spelt_out([argument for argument in overrides if argument not in ("--dry-run", "--tiny")])
    if "--help" in overrides or "-h" in overrides:
        _override(recipe, ["--help"])
        return None
    _refuse_unknown(recipe, overrides)
    return _override(recipe, overrides), dry_run


def _spelt_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--resume [PATH]` and `--allow-change FIELD ...` as the fields that they set."""
    result: list[str] = []
    allowed: list[str] = []
    rest = list(arguments)
    while rest:
        given = rest.pop(0)
        argument, _, value = given.partition("=")
        values = [value] if value else []
        if argument == "--resume":
            if not values and rest and not rest[0].startswith("--"):
                values = [rest.pop(0)]
            result += ["--checkpoint.resume", *(values or ["latest"])]
        elif argument in ("--allow-change", "--allow_change"):
            while not value and rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            allowed += values
        else:
            result.append(given)
    return [*result, *(["--checkpoint.allow_change", *allowed] if allowed else [])]


def print_overview() -> None:
    """Print usage and every recipe with its description."""
    print(
        f"{USAGE}\n\nTrain a recipe. `python train.py RECIPE --help` lists every field with its value there.\n\n"
        "  --tiny     a few small layers of the same kind in the same layout, on the CPU and without the network\n"
        "  --dry-run  print the recipe as it would be trained\n"
        "  --precompile  fill the compile cache, train nothing, and prove that the next run finds everything in it\n"
        "  --resume [PATH|auto]     go on from the newest complete checkpoint of the recipe, or from this one\n"
        "  --allow-change FIELD...  resume although these fields differ from the resumed run's\n\nrecipes:"
    )
    width = max(map(len, names()))
    for name in names():
        print(f"  {name:<{width}}  {load(name).description}")


def lines(recipe: Recipe) -> list[str]:
    """Return the resolved recipe as section.field = value lines."""
    result = []
    for section, values in _sections(recipe):
        result += [f"{section}.{item.name} = {getattr(values, item.name)!r}" for item in fields(values)]
    return result


def _sections(recipe: Recipe):
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if is_dataclass(value) and item.name != "published":
            yield item.name, value


def _flags(recipe: Recipe) -> dict[str, Any]:
    """Return every flag with the type of its field."""
    result = {}
    for section, values in _sections(recipe):
        for name, hint in get_type_hints(type(values)).items():
            result[f"--{section}.{name}"] = hint
            if hint is bool:
                result[f"--{section}.no_{name}"] = hint
    return result


def _refuse_unknown(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Name the nearest flag; the parser behind this prints a page instead."""
    flags = _flags(recipe)
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        got = argument.partition("=")[0]
        flag = "--" + got[2:].replace("-", "_")
        if flag not in flags:
            raise RecipeError(f"unknown flag {got!r}{_nearest(flag, flags)}; see `python train.py {recipe.name} --help`")


def _nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f", nearest: {', '.join(close)}" if close else ""


def _override(recipe: Recipe, arguments: Sequence[str]) -> Recipe:
    import tyro

    printed = io.StringIO()
    try:
        with redirect_stdout(sys.stdout if "--help" in arguments else printed), redirect_stderr(printed):
            return tyro.cli(
                Recipe,
                prog=f"python train.py {recipe.name}",
                default=recipe,
                args=list(arguments),
                use_underscores=True,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as exit_:
        if not exit_.code:
            return recipe
        raise RecipeError(_one_line(printed.getvalue())) from None


def _one_line(page: str) -> str:
    """Return the sentence inside the parser's framed error page: between its title and its pointer to the help."""
    words = [line.strip(" \u2502\u256d\u256e\u2570\u256f\u2500") for line in page.splitlines()]
    text = " ".join(word for word in words if word.strip("-"))
    text = re.split("Argument helptext:|For full helptext", text)[0]
    for title in ("Value error", "Invalid choice", "Missing argument", "Unrecognized options", "Parsing error"):
        text = text.removeprefix(title)
    return text.strip() or "the arguments could not be read"
