"""Run folders are removed only when nobody needs them any more, and what they cost stays known."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ledger.cost import Attempt
from ledger.runs import LedgerError, Run, list_rows, read_run

REMOVED = ".ledger-removed.jsonl"
"""One line per run that is gone: what it cost. Beside the runs."""
_GOING = ".removed-"


def check_removable(chosen: Sequence[Run], runs: Path) -> None:
    """Return if all of them can be removed.

    Raises:
        LedgerError: if one of them must stay, or lies elsewhere.
    """
    elsewhere = [str(run.folder) for run in chosen if run.folder.resolve().parent != runs.resolve()]
    if elsewhere:
        raise LedgerError(f"rm: {', '.join(elsewhere)}: not in {runs}; name its folder with --runs FOLDER")
    if reasons := list(_reasons_to_keep(chosen, runs)):
        raise LedgerError("rm: nothing was removed:\n  " + "\n  ".join(reasons))


def _reasons_to_keep(chosen: Sequence[Run], runs: Path) -> Iterator[str]:
    """Yield why some of the chosen runs must stay: they run, or others went on from their checkpoints."""
    ids = {run.id for run in chosen}
    for run in chosen:
        if run.state == "running":
            yield f"{run.id} is running; stop it first"
    for row in list_rows(runs):
        if row.id not in ids:
            came_from = read_run(runs / row.id).text("checkpoints.resumed_from.run")
            if came_from in ids:
                yield f"{came_from} is what {row.id} went on from; remove that one too, or first"


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder, without following links."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def remove(chosen: Sequence[Run], runs: Path) -> None:
    """Remove run folders, after writing down what they cost.

    Raises:
        LedgerError: before anything is removed, as check_removable does.
    """
    check_removable(chosen, runs)
    with open(runs / REMOVED, "a", encoding="ascii") as file:
        for run in chosen:
            file.write(json.dumps(asdict(Attempt.of(run))) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for run in chosen:
        # Out of sight in one move: an interrupted removal leaves no half of a run that looks like a whole one.
        with suppress(FileNotFoundError):
            os.rename(run.folder, runs / f"{_GOING}{run.id}")
    for folder in runs.glob(f"{_GOING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def attempts(runs: Path) -> list[Attempt]:
    """Return every attempt there was, those that have been removed included, oldest first."""
    found = {attempt.id: attempt for attempt in _removed(runs)}
    found |= {row.id: Attempt.of(read_run(runs / row.id)) for row in list_rows(runs)}
    return [found[id] for id in sorted(found)]


def _removed(runs: Path) -> Iterator[Attempt]:
    with suppress(FileNotFoundError), open(runs / REMOVED, encoding="ascii", errors="replace") as file:
        for line in file:
            with suppress(ValueError, TypeError):  # cut off, edited, or of another version
                yield Attempt(**json.loads(line))
