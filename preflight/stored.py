"""Inventories as data: what is stored of one, and of which work it is, so that two of them can be compared much later."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from backends import get_backend
from preflight.graphs import Graph, Line
from preflight.inventory import Finding, Inventory, take_inventory
from preflight.stage import rehearsed_ranks
from recipes import command_line
from recipes.base import Recipe
from training.snapshot import source_files

FORMAT = 1
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Stored:
    """An inventory and the work that it was taken of."""

    recipe: dict[str, str]
    """section.field: value, of every field."""
    ranks: int
    settings: dict[str, str | None]
    """What is part of a compile cache's key besides the graph: versions, variables, LNC."""
    sources: dict[str, str]
    """Digest of each file of the project that takes part in a step."""
    inventory: Inventory

    def write(self, path: Path) -> None:
        """Write the file in one move."""
        content = {"format": FORMAT, **asdict(self)}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Stored:
        """Read what `write` has written.

        Raises:
            ValueError: if it is something else, or of another format.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(f"{path}: not an inventory of format {FORMAT}; take it again")
            found = content.pop("inventory")
            graphs = [Graph(**{**graph, "lines": tuple(Line(**line) for line in graph["lines"])}) for graph in found["graphs"]]
            findings = [Finding(**finding) for finding in found["findings"]]
            return cls(**content, inventory=Inventory(graphs, found["operators"], findings, found["places"]))
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not an inventory: {error}") from None


def take(recipe: Recipe, rank: int = 0) -> Stored:
    """Take a recipe's inventory, as one of the ranks that it is made for."""
    world_size = recipe.parallel.ranks
    with rehearsed_ranks(recipe, world_size, rank) as ranks:
        inventory = take_inventory(recipe, ranks)
    return Stored(fields_of(recipe), world_size, get_backend(recipe.run.device).compile_settings(), digests(ROOT), inventory)


def digests(root: Path) -> dict[str, str]:
    """Return a digest of each file that a step may depend on, by its path below the project's root."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in source_files(root)
        if path.parts[-2] != "recipes"  # what a recipe says is compared field by field
    }


def fields_of(recipe: Recipe) -> dict[str, str]:
    """Return every field with its value as text."""
    return {name: value for name, _, value in (line.partition(" = ") for line in command_line.lines(recipe))}


def parse(arguments: Sequence[str]) -> Recipe:
    """Return the recipe of a command line that is not a call for help."""
    parsed = command_line.parse(arguments)
    assert parsed is not None
    return parsed[0]
