"""Which graphs are compiled again, and why: two inventories side by side, in the words of whoever made the change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from preflight.graphs import Graph, Line
from preflight.stored import Stored

_TRIED_FIELDS = 8
"""Changed fields that are tried one by one."""


@dataclass(frozen=True)
class NewGraph:
    """One graph that the older inventory does not have."""

    graph: Graph
    difference: str
    """Where it first differs from the graph that it replaces."""
    where: str | None


@dataclass
class Comparison:
    """What has changed since an older inventory, and what of it is compiled again."""

    reused: list[Graph] = field(default_factory=list)
    new: list[NewGraph] = field(default_factory=list)
    new_operators: list[str] = field(default_factory=list)
    """Eager operators with new types, shapes or scalars."""
    changed_settings: list[str] = field(default_factory=list)
    """Versions, variables and LNC: a change of one compiles everything again."""
    changed_fields: list[str] = field(default_factory=list)
    """Fields of the recipe, as `training.seq_len: 64 -> 128`."""
    changed_sources: list[str] = field(default_factory=list)
    """Files of the project."""
    causes: list[str] = field(default_factory=list)
    """Those of the changes that a new graph or operator comes from."""

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.new and not self.new_operators:
            return "nothing will recompile"
        because = f": {'; '.join(self.causes)}" if self.causes else ""
        graphs = f"{len(self.new)} of {len(self.new) + len(self.reused)} graphs"
        operators = f" and {len(self.new_operators)} eager operators" if self.new_operators else ""
        return f"{graphs}{operators} will be compiled again{because}"


def compare(old: Stored, new: Stored) -> Comparison:
    """Compare two inventories; the causes are left to `find_causes`."""
    files = {*old.sources, *new.sources}
    comparison = Comparison(
        changed_settings=_differences(old.settings, new.settings),
        changed_fields=_differences(old.recipe, new.recipe),
        changed_sources=sorted(file for file in files if old.sources.get(file) != new.sources.get(file)),
    )
    known, everything = old.inventory.distinct, bool(comparison.changed_settings)
    for fingerprint, graph in new.inventory.distinct.items():
        if fingerprint in known and not everything:
            comparison.reused.append(graph)
        else:
            same = ("the same graph under another key", None)
            difference = same if fingerprint in known else first_difference(graph, old.inventory.graphs)
            comparison.new.append(NewGraph(graph, *difference))
    operators = new.inventory.operators
    comparison.new_operators = sorted(set(operators) if everything else set(operators) - set(old.inventory.operators))
    return comparison


def find_causes(
    comparison: Comparison,
    old: Stored,
    new: Stored,
    with_field: Callable[[str, str], Stored | None] | None = None,
    edits: Sequence[str] = (),
) -> None:
    """Fill in the causes.

    Args:
        with_field: takes the older inventory again with one field changed, as name and new value; None: it cannot be. Only
            called where several things have changed: one change needs no trial.
        edits: changed lines of the sources, as `file:line ...`; none are known if the older sources are not kept.
    """
    if not comparison.new and not comparison.new_operators:
        return
    if comparison.changed_settings:
        comparison.causes = [f"{change}, which is part of the cache's key" for change in comparison.changed_settings]
        return
    fields = comparison.changed_fields
    if len(fields) == 1 and not comparison.changed_sources:
        comparison.causes = list(fields)
        return
    for change in fields[:_TRIED_FIELDS]:
        name = change.partition(": ")[0]
        tried = with_field(name, new.recipe[name]) if with_field else None
        if tried is not None and _compiles_more(old, tried):
            comparison.causes.append(change)
    if comparison.changed_sources:
        used = {(line.where or "").partition(" ")[0] for graph in new.inventory.graphs for line in graph.lines}
        in_a_graph = [edit for edit in edits if edit.partition(" ")[0] in used]
        unknown = [f"an edit of {file}" for file in comparison.changed_sources]
        comparison.causes += in_a_graph or list(edits) or unknown


def _compiles_more(old: Stored, other: Stored) -> bool:
    mine, theirs = old.inventory, other.inventory
    return bool(set(theirs.distinct) - set(mine.distinct)) or bool(set(theirs.operators) - set(mine.operators))


def _differences(old: Mapping[str, str | None], new: Mapping[str, str | None]) -> list[str]:
    names = [*old, *(name for name in new if name not in old)]
    return [f"{name}: {old.get(name)} -> {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def first_difference(graph: Graph, older: Sequence[Graph]) -> tuple[str, str | None]:
    """Say where a graph departs from the most similar of some others, and which line of the source is behind it."""
    candidates = [other for other in older if other.direction == graph.direction]
    if not candidates:
        return "there was no such graph", None
    other = max(candidates, key=lambda candidate: (candidate.function == graph.function, _alike(candidate, graph)))
    pairs = list(itertools.zip_longest(other.lines, graph.lines, fillvalue=Line("nothing")))
    before, after = next((before, after) for before, after in pairs if before.text != after.text)
    # What comes in differs first; the line of the source that is behind it comes later.
    computed = [pair for pair in pairs if pair[0].text != pair[1].text and not pair[1].text.startswith("input ")]
    where = next((new.where or old.where for old, new in computed if new.where or old.where), None)
    return f"{_without_numbers(before.text)} -> {_without_numbers(after.text)}", where


def _alike(one: Graph, other: Graph) -> int:
    return -abs(len(one.lines) - len(other.lines))


def _without_numbers(line: str) -> str:
    """Return a line without the position of its result."""
    return line.partition(" = ")[2] or line
