"""train.py with a moment to be killed at: `python -m tests.crash_worker PLACE COUNT HOW ARGUMENTS`.

When the place is reached for the COUNT-th time the process kills itself (HOW is `before` or `after`), or says so and goes on
until the campaign kills it (HOW is `announce`).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

PLACES = {
    # place: module, class, methods
    "step": ("training.metrics", "Meter", ("add",)),
    "load": ("training.run_state", "RunState", ("load",)),
    "stage": ("torch.distributed.checkpoint.staging", "DefaultStager", ("stage",)),
    "write": ("training.checkpoint_files", "_Checked", ("write",)),
    "metadata": ("training.checkpoint_files", "CheckedWriter", ("finish",)),
    "marker": ("training.checkpoint_store", "CheckpointStore", ("mark_complete",)),
    "retire": ("training.checkpoint_store", "CheckpointStore", ("withdraw",)),
    "export": ("training.checkpoint", "Checkpointer", ("export",)),
    "exported file": ("training.weights", None, ("_write_shards", "_write_json")),
    "record": ("training.record", "RunRecord", ("write", "append_steps")),
    "end of the record": ("training.record", "RunRecord", ("finish",)),
}


def main(place: str, count: str, how: str, *arguments: str) -> int:
    """Run train.main with the place made deadly."""
    train = importlib.import_module("train")
    if place == "start":
        announce()
    else:
        module_name, owner, names = PLACES[place]
        module = importlib.import_module(module_name)
        left = [int(count)]
        for name in names:
            make_deadly(getattr(module, owner) if owner else module, name, left, how)
    return train.main(list(arguments))


def announce() -> None:
    # One system call: a buffered line might come out after the process is dead.
    os.write(1, b"DEADLY\n")


def make_deadly(owner: Any, name: str, left: list[int], how: str) -> None:
    original = getattr(owner, name)

    def deadly(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and how == "announce":
            announce()
        if left[0] == 0 and how == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        if left[0] == 0 and how == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
