"""One flat row per run: every knob of its recipe beside every number that was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ledger.runs import Row, Run

_LEFT_OUT = ("identity.argv", "environment.variables", "environment.device_facts", "timing.ranks", "timing.windows")


def flat(run: Run) -> dict[str, Any]:
    """Return column: value. Lists become their length, except where an entry of them has a name."""
    row: dict[str, Any] = {"id": run.id, "state": run.state, "problem": run.problem, "mfu": Row.of(run).mfu}
    record = {name: value for name, value in run.record.items() if name not in ("id", "status", "schema_version")}
    row.update(_walk("", record))
    return row


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if path in _LEFT_OUT:
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(f"{path}.{name}" if path else str(name), item)
    elif path == "timing.phases" and isinstance(value, list):
        for phase in value:
            if isinstance(phase, dict):
                yield f"timing.phases.{phase.get('phase')}.seconds", phase.get("seconds")
    elif isinstance(value, list):
        simple = all(isinstance(item, (int, float, str)) for item in value)
        yield (_short(path), " ".join(map(str, value))) if simple else (f"{_short(path)}.count", len(value))
    else:
        yield _short(path), value


def _short(path: str) -> str:
    """A knob is called as on the command line."""
    return path.removeprefix("identity.recipe.")


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of all rows, those of the first run first."""
    return list(dict.fromkeys(name for row in rows for name in row))
