"""What is deleted of runs that were killed, and what is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.strays import is_gone, own_process, remove_strays

STORE = "/somewhere/checkpoints"


def make(runs: Path, name: str, record: dict[str, Any] | None) -> Path:
    """A run folder with everything that a kill can leave half written, and something that is whole."""
    folder = runs / name
    for path in ("checkpoints/.hf.12ab.partial", "checkpoints/step-00000003", "checkpoints/step-00000006", "checkpoints/hf"):
        (folder / path).mkdir(parents=True)
    (folder / "checkpoints" / ".hf.12ab.partial" / "model.safetensors").write_text("half")
    (folder / "checkpoints" / "step-00000003" / "complete.json").write_text("{}")
    (folder / "checkpoints" / "step-00000006" / "__0_0.distcp").write_text("half")
    (folder / ".record.json.partial").write_text("{")
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record))
    return folder


def left(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "record.json"} - {"checkpoints"}


def record(status: str, store: str = "/elsewhere", **process: Any) -> dict[str, Any]:
    return {"status": status, "checkpoints": {"folder": store}, "identity": {"process": own_process() | process}}


WHOLE = {"checkpoints/hf", "checkpoints/step-00000003", "checkpoints/step-00000003/complete.json"}
UNFINISHED = {"checkpoints/step-00000006", "checkpoints/step-00000006/__0_0.distcp"}


@pytest.mark.parametrize(
    ("of", "stays"),
    [
        (record("running", started=1), WHOLE),
        (record("running", pid=2**22 + 1), WHOLE),
        (record("running", STORE, machine="another"), WHOLE | UNFINISHED),
        (record("failed"), WHOLE),
        (record("interrupted"), WHOLE),
        (None, WHOLE),
    ],
    ids=["process gone", "no such process", "saved where we do", "failed", "interrupted", "no record"],
)
def test_what_a_killed_run_left_is_removed(of: dict[str, Any] | None, stays: set[str], tmp_path: Path):
    folder = make(tmp_path, "20260101-000000-debug-aaaaaa", of)
    assert remove_strays(tmp_path / "20260102-000000-debug-bbbbbb", "debug", STORE)
    assert left(folder) == stays


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("20260101-000000-debug-aaaaaa", record("running")),
        ("20260101-000000-debug-aaaaaa", record("running", machine="another", started=1)),
        ("20260103-000000-debug-aaaaaa", None),
        ("20260101-000000-qwen3_0_6b-aaaaaa", record("running", started=1)),
        ("20260102-000000-debug-bbbbbb", record("running", started=1)),
    ],
    ids=["alive", "on another machine", "younger than we", "another recipe", "ourselves"],
)
def test_what_may_belong_to_somebody_is_left_alone(name: str, of: dict[str, Any] | None, tmp_path: Path):
    folder = make(tmp_path, name, of)
    before = left(folder)
    assert remove_strays(tmp_path / "20260102-000000-debug-bbbbbb", "debug", STORE) == []
    assert left(folder) == before


@pytest.mark.parametrize("status", ["running", "finished"])
def test_a_folder_that_another_run_saves_to_keeps_what_is_being_written(status: str, tmp_path: Path):
    """A run that resumed saves to the folder of the one before it, and may be in the middle of that."""
    folder = make(tmp_path, "20260101-000000-debug-aaaaaa", record("failed"))
    resumed = tmp_path / "20260101-000001-debug-cccccc"
    resumed.mkdir()
    (resumed / "record.json").write_text(json.dumps(record(status, str(folder / "checkpoints"))))
    remove_strays(tmp_path / "20260102-000000-debug-bbbbbb", "debug", STORE)
    assert left(folder) == (WHOLE | UNFINISHED if status == "running" else WHOLE)


def test_a_folder_that_held_nothing_else_goes_too(tmp_path: Path):
    folder = tmp_path / "20260101-000000-debug-aaaaaa"
    folder.mkdir()
    (folder / ".record.json.partial").write_text("{")
    remove_strays(tmp_path / "20260102-000000-debug-bbbbbb", "debug", STORE)
    assert not folder.exists()


def test_a_record_that_cannot_be_read_is_nobodys_to_clean(tmp_path: Path):
    folder = make(tmp_path, "20260101-000000-debug-aaaaaa", None)
    (folder / "record.json").write_text("{")
    assert remove_strays(tmp_path / "20260102-000000-debug-bbbbbb", "debug", STORE) == []


def test_who_is_gone():
    assert not is_gone(record("running")), "this process is there"
    assert is_gone(record("running", started=1)), "its number was given to another"
    assert not is_gone(record("finished", started=1)), "it has said how it ended"
    assert not is_gone({"status": "running"}) and not is_gone({})
