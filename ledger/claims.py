"""Published figures as data, one file per claim in ledger/claims/: what is known, what was inferred, what is unknown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ledger.runs import LedgerError

FOLDER = Path(__file__).parent / "claims"
STATUSES = ("published", "inferred", "unknown")


@dataclass(frozen=True)
class Value:
    """One figure or fact of a claim."""

    value: Any
    """None: unknown."""
    status: str
    """One of STATUSES."""
    note: str | None = None
    """What it was inferred from, or what belongs to it."""


@dataclass(frozen=True)
class Claim:
    """What somebody says of a run that is not in the ledger."""

    name: str
    title: str
    source: str
    date: str
    work: dict[str, Value]
    """What was done, as far as it is known."""
    rows: dict[str, dict[str, Value]]
    """Mode: the figures measured in it."""
    tolerance: dict[str, Value]
    """Figure: how far off, as a share, still counts as reproduced."""

    def fact(self, name: str) -> Any:
        """Return a fact of the work. None: it is unknown."""
        return self.work[name].value if name in self.work else None

    def figure(self, mode: str, name: str) -> float | None:
        """Return a figure. None: it was not published."""
        found = self.rows.get(mode, {}).get(name)
        return None if found is None else found.value


def names() -> list[str]:
    """Return the name of every claim."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(name: str) -> Claim:
    """Return a claim by name.

    Raises:
        LedgerError: if there is none of that name.
    """
    path = FOLDER / f"{name}.json"
    if name not in names():
        raise LedgerError(f"claim: got {name!r}, allowed: {', '.join(names())}")
    content = json.loads(path.read_text(encoding="utf-8"))
    return Claim(
        name=name,
        title=content["title"],
        source=content["source"],
        date=content["date"],
        work=_values(content["work"]),
        rows={mode: _values(row) for mode, row in content["rows"].items()},
        tolerance=_values(content["tolerance"]),
    )


def _values(content: dict[str, dict[str, Any]]) -> dict[str, Value]:
    return {name: Value(entry["value"], entry.get("status", "ours"), entry.get("note")) for name, entry in content.items()}
