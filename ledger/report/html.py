"""The pieces that every section is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ledger.runs import Run
from ledger.verdict import CANNOT_TELL, NOT_REPRODUCED, REPRODUCED

_CLASSES = {
    "finished": "good",
    REPRODUCED: "good",
    "interrupted": "doubt",
    "running": "doubt",
    CANNOT_TELL: "doubt",
    **dict.fromkeys(("failed", "killed", "unreadable", "no record", NOT_REPRODUCED), "bad"),
}


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", text: Sequence[int] = (0,)) -> str:
    """Return a table; an empty text if it has no rows. The states and verdicts of runs are coloured.

    Args:
        rows: of texts, which are escaped.
        text: numbers of the columns that hold text; the others are set to the right.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    if not rows:
        return ""

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        shown = f'<span class="state {_CLASSES[content]}">{escape(content)}</span>' if content in _CLASSES else escape(content)
        number = "" if column in text else ' class="number"'
        return f"<{tag}{number}{scope}>{shown}</{tag}>"

    head = "".join(cell("th", column, name, ' scope="col"') for column, name in enumerate(header))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", column, content) for column, content in enumerate(row) if column)
        + "</tr>"
        for row in rows
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{named}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(text: str) -> str:
    """Return a remark."""
    return f'<p class="note">{escape(text)}</p>'


def figure(drawn: str) -> str:
    """Return a chart in its frame; an empty text for an empty one."""
    return f"<figure>{drawn}</figure>" if drawn else ""


def details(summary: str, body: str) -> str:
    """Return what is shown when asked for, and in print; an empty text for an empty body."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>" if body else ""


def name_of(run: Run, runs: Sequence[Run]) -> str:
    """Return what a chart calls a run: its mode, if that tells the runs apart."""
    modes = [each.text("identity.recipe.run.mode") for each in runs]
    mode = run.text("identity.recipe.run.mode")
    return run.id if mode is None or modes.count(mode) > 1 else mode


def colour_of(run: Run, runs: Sequence[Run]) -> int:
    """Return the number of a run's colour in every chart."""
    return 1 + list(runs).index(run) % 10
