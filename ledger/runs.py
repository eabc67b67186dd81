"""Run folders, read with suspicion: a record may be missing, cut off, edited by hand, from a newer version, or of a killed run.

Ten thousand records are too many to parse for one table, so the rows of a folder are kept in `.ledger-index.json` beside the
runs. It only remembers what was read: a row counts while its record has the same size and time, and is read again else.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from backends.peak_flops import table_name
from recipes.base import RecipeError
from training.record import SCHEMA_VERSION
from training.strays import is_gone

INDEX = ".ledger-index.json"
_INDEX_VERSION = 1
_TAIL_BYTES = 1 << 14


class LedgerError(RecipeError):
    """A question to the ledger that has no answer; the message says why."""


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    record: dict[str, Any] = field(default_factory=dict)
    """Empty where it cannot be read."""
    state: str = "unreadable"
    """finished, failed, interrupted or running as the record says; killed: it says running and its process is gone; no record:
    killed before it had written one; unreadable."""
    problem: str | None = None
    """What is wrong with the record. None: nothing was found."""

    @property
    def id(self) -> str:
        return self.folder.name

    def get(self, path: str) -> Any:
        """Return what lies at section.name.name of the record. None: it is not there."""
        value: Any = self.record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def number(self, path: str) -> float | None:
        """Return a number of the record. None: it is not there, or it is no number."""
        value = self.get(path)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def text(self, path: str) -> str | None:
        value = self.get(path)
        return value if isinstance(value, str) else None

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded steps in order; a last line that a kill cut off is left out."""
        with suppress(FileNotFoundError), open(self.folder / "steps.jsonl", encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError):
                    step = json.loads(line)
                    if isinstance(step, dict):
                        yield step

    def last_step(self) -> dict[str, Any]:
        """Return the last step that was recorded, without reading the others; empty if there is none."""
        with suppress(OSError), open(self.folder / "steps.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError):
                    step = json.loads(line)
                    if isinstance(step, dict):
                        return step
        return {}


def read_run(folder: Path) -> Run:
    """Read one run, whatever state its record is in."""
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Run(folder, state="no record", problem="killed before it had written a record")
    except (OSError, ValueError) as error:
        return Run(folder, problem=f"record.json: {str(error).splitlines()[0]}")
    if not isinstance(record, dict):
        return Run(folder, problem=f"record.json: got {type(record).__name__}, should be an object")
    version, state = record.get("schema_version"), record.get("status")
    problem = None
    if not isinstance(version, int):
        problem = f"record.json: schema_version {version!r}: not written by this project, or edited"
    elif version > SCHEMA_VERSION:
        problem = (
            f"record.json: schema_version {version}, this version knows {SCHEMA_VERSION}: some of it may mean something else"
        )
    elif state not in ("finished", "failed", "interrupted", "running"):
        problem = f"record.json: status {state!r}: edited"
    if state == "running" and is_gone(record):
        state, problem = "killed", problem or "its process is gone"
    return Run(folder, record, state if isinstance(state, str) else "unreadable", problem)


@dataclass(frozen=True)
class Row:
    """What the list shows of one run. None: unknown."""

    id: str
    state: str
    problem: str | None
    recipe: str | None
    device: str | None
    mode: str | None
    ranks: int | None
    cache_state: str | None
    first_step_seconds: float | None
    seconds_per_step: float | None
    tokens_per_second: float | None
    mfu: float | None
    loss: float | None
    steps: int | None
    hours: float | None
    cost: float | None

    @classmethod
    def of(cls, run: Run) -> Row:
        """Take the row out of a record."""
        whole = {name: run.number(path) for name, path in (("ranks", "work.world_size"), ("steps", "quality.steps_recorded"))}
        return cls(
            id=run.id,
            state=run.state,
            problem=run.problem,
            recipe=run.text("identity.recipe.name"),
            device=run.text("environment.device"),
            mode=run.text("identity.recipe.run.mode"),
            ranks=None if whole["ranks"] is None else int(whole["ranks"]),
            cache_state=run.text("compile.cache.state"),
            first_step_seconds=run.number("timing.first_step_seconds"),
            seconds_per_step=run.number("timing.steady.seconds_per_step_median"),
            tokens_per_second=run.number("timing.steady.tokens_per_second"),
            mfu=usual_mfu(run),
            loss=run.number("quality.loss_last_window"),
            steps=None if whole["steps"] is None else int(whole["steps"]),
            hours=run.number("cost.hours"),
            cost=run.number("cost.cost"),
        )


def usual_mfu(run: Run) -> float | None:
    """Return the first MFU of the record under the `torchtitan` numerator. None: it has none."""
    for entry in run.get("timing.mfu") or ():
        if isinstance(entry, dict) and entry.get("numerator") == "torchtitan" and isinstance(entry.get("mfu"), float):
            return entry["mfu"]
    return None


def chip(run: Run) -> str | None:
    """Return the accelerator, or the processor, by the name of the table of peaks where it is in it. None: unknown."""
    name = run.text("identity.recipe.run.chip") or run.text("environment.device_facts.chip")
    return table_name(name) or name


def list_rows(runs: Path) -> list[Row]:
    """Return a row for every run in a folder, oldest first."""
    known = _read_index(runs)
    rows: list[Row] = []
    index: dict[str, Any] = {}
    changed = False
    for name, stamp in _folders(runs):
        entry = known.get(name)
        # A run that says running may have died since: only its process tells.
        if entry is not None and entry["stamp"] == stamp and entry["row"]["state"] not in ("running", "no record"):
            row = Row(**entry["row"])
        else:
            row, changed = Row.of(read_run(runs / name)), True
        rows.append(row)
        index[name] = {"stamp": stamp, "row": asdict(row)}
    if changed or known.keys() - index.keys():
        _write_index(runs, index)
    return rows


def _folders(runs: Path) -> Iterator[tuple[str, list[int] | None]]:
    """Yield the name of each run folder with size and time of its record, sorted by name."""
    try:
        names = sorted(entry.name for entry in os.scandir(runs) if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        raise LedgerError(f"no runs: {runs} does not exist; name another folder with --runs FOLDER") from None
    for name in names:
        try:
            found = os.stat(os.path.join(runs, name, "record.json"))
            yield name, [found.st_size, found.st_mtime_ns]
        except FileNotFoundError:
            if _looks_like_a_run(name):
                yield name, None
        except OSError:
            yield name, None


def _looks_like_a_run(name: str) -> bool:
    date, _, rest = name.partition("-")
    return len(date) == 8 and date.isdecimal() and rest[:6].isdecimal()


def _read_index(runs: Path) -> dict[str, Any]:
    try:
        content = json.loads((runs / INDEX).read_text(encoding="utf-8"))
        columns = [column.name for column in fields(Row)]
        return content["rows"] if content["version"] == _INDEX_VERSION and content["columns"] == columns else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_index(runs: Path, index: dict[str, Any]) -> None:
    content = {"version": _INDEX_VERSION, "columns": [column.name for column in fields(Row)], "rows": index}
    partial = runs / f"{INDEX}.{secrets.token_hex(4)}.partial"
    try:
        partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        os.replace(partial, runs / INDEX)
    except OSError:  # runs that may only be read are listed all the same
        with suppress(OSError):
            partial.unlink()


def find_run(name: str, runs: Path) -> Run:
    """Return the run of a path, an id, or a part of an id that only one run has.

    Raises:
        LedgerError: if there is none, or more than one.
    """
    if "/" in name or Path(name, "record.json").exists():
        if not Path(name).is_dir():
            raise LedgerError(f"{name}: no such run folder")
        return read_run(Path(name))
    found = [folder for folder, _ in _folders(runs) if name in folder]
    if name in found:
        found = [name]
    if len(found) != 1:
        several = (
            f"{len(found)} runs have that in their names ({', '.join(found[:3])}, ...)" if found else "no run has that name"
        )
        raise LedgerError(f"{name}: {several} in {runs}; see `python -m ledger list`")
    return read_run(runs / found[0])
