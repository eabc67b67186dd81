"""What is another program on another rank: it is compiled once for each of them, where one could serve all."""

from __future__ import annotations

import re

from preflight.against import first_difference
from preflight.inventory import Finding, Inventory

KIND = "rank constant"


def rank_constants(first: Inventory, last: Inventory) -> list[Finding]:
    """Compare two ranks of one recipe, of which the last may have been rehearsed with fewer blocks.

    Of an eager operator with the same shapes on both the whole numbers are compared: an offset into a vocabulary, say.
    """
    known = first.distinct
    found = []
    for fingerprint, graph in last.distinct.items():
        if fingerprint not in known:
            difference, where = first_difference(graph, first.graphs)
            found.append(Finding(KIND, where, f"a graph is another one on the last rank: {difference}"))
    shapes = {_without_numbers(operator) for operator in first.operators}
    for operator, count in last.operators.items():
        if operator not in first.operators and _without_numbers(operator) in shapes:
            found.append(Finding(KIND, last.places.get(operator), f"{operator} on the last rank only", count))
    return found


def _without_numbers(operator: str) -> str:
    """Return an operator with the shapes of its tensors, but without the whole numbers among its arguments."""
    return re.sub(r"(?<![\w\[.])(?<!\d, )-?\d+(?=[,)])", "n", operator)
