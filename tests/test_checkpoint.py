"""What a save that goes wrong costs, and what a save that goes well makes the loop wait."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import train
from tests.durable import ended, run
from tests.test_train import TINY
from training.checkpoint_files import _Checked
from training.checkpoint_store import CheckpointStore

EVERY_THREE = ("--checkpoint.every_steps", "3", "--checkpoint.keep_last", "9", "--run.log_every", "1")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with room for one checkpoint (7.9 MB) and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def folder_flag(folder: Path) -> tuple[str, str]:
    return "--checkpoint.folder", str(folder)


def test_c11_a_disk_without_room_is_not_begun_to_fill(disk: Path, tmp_path: Path, capsys):
    """The first fits, the second does not: training ends as if nothing had been, and the first one loads."""
    whole = run(tmp_path / "whole", *EVERY_THREE, steps=8)
    # The third, at the last step, would fail the run: here the last step saves nothing.
    full = run(tmp_path / "full", *EVERY_THREE, *folder_flag(disk / "checkpoints"), steps=8)
    out = capsys.readouterr().out
    assert full.code == 1 and full.steps == whole.steps, "training state is intact"
    first, second, third = full.record["checkpoints"]["saves"]
    assert first["error"] is None
    for save, step in ((second, 6), (third, 8)):
        assert f"checkpoint of step {step} not written: it takes 7.8 MB and {disk}/checkpoints has 4" in save["error"]
    assert "training goes on, older checkpoints stay" in out
    assert f"the newest complete checkpoint is {disk}/checkpoints/step-00000003" in full.record["cause"]
    assert full.store.steps() == [3], "nothing half written is left"
    resumed = run(tmp_path / "full", "--resume", full.at(3), "--run.log_every", "1", steps=8)
    assert resumed.steps == whole.steps[3:]


def test_c11_a_disk_that_fills_up_while_it_is_written(disk: Path, tmp_path: Path, monkeypatch):
    """Somebody else takes the room after it was checked: the error names the file, and what is half written does not count."""
    monkeypatch.setattr(CheckpointStore, "free_bytes", lambda self: None)
    whole = run(tmp_path / "whole", *EVERY_THREE, steps=7)
    full = run(tmp_path / "full", *EVERY_THREE, *folder_flag(disk / "checkpoints"), steps=7)
    assert full.code == 1 and full.steps == whole.steps
    first, second, third = full.record["checkpoints"]["saves"]
    assert first["error"] is None and first["seconds"] > 0
    path = f"{disk}/checkpoints/step-00000006/__0_0.distcp"
    assert second["error"] == f"checkpoint of step 6 failed: rank 0: No space left on device: {path}"
    assert "step-00000007/__0_0.distcp" in third["error"] and second["seconds"] is None
    assert full.store.complete_steps() == [3]
    assert not Path(path).exists(), "a file that could not be finished gives its room back"


def test_a_full_disk_later_has_room_again(tmp_path: Path, monkeypatch):
    """The next save that succeeds clears away what the failed one left."""
    failed = []
    write = _Checked.write

    def fail_once(self, data):
        if len(failed) == 0 and self.size > 1_000_000:
            failed.append(self.size)
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(_Checked, "write", fail_once)
    done = run(tmp_path, *EVERY_THREE, steps=6)
    assert done.code == 0 and failed
    assert [save["error"] is None for save in done.record["checkpoints"]["saves"]] == [False, True]
    assert done.store.steps() == [6]


def test_a_folder_that_cannot_be_written(disk: Path, tmp_path: Path):
    """A read-only disk: the error names what could not be made."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    done = run(tmp_path, *EVERY_THREE, *folder_flag(disk / "checkpoints"), steps=4)
    assert done.code == 1 and len(done.steps) == 4
    error = done.record["checkpoints"]["saves"][0]["error"]
    assert error == f"checkpoint of step 3 failed: rank 0: Read-only file system: {disk}/checkpoints"


def test_a_folder_without_permission(tmp_path: Path, monkeypatch):
    """As anybody but root meets it."""

    def refuse(self, path, exist_ok):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.makedirs", refuse)
    done = run(tmp_path, *EVERY_THREE, steps=4)
    error = done.record["checkpoints"]["saves"][0]["error"]
    assert done.code == 1 and error.startswith("checkpoint of step 3 failed: rank 0: Permission denied: ")
    assert error.endswith("step-00000003")


def test_a_file_where_the_folder_should_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "runs", *EVERY_THREE, *folder_flag(tmp_path / "file"), steps=4)
    assert done.code == 1 and len(done.steps) == 4
    assert str(tmp_path / "file") in done.record["checkpoints"]["saves"][0]["error"]


def test_an_old_one_that_cannot_be_deleted_is_only_a_warning(tmp_path: Path, monkeypatch, capsys):
    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", "an old file")

    monkeypatch.setattr(CheckpointStore, "withdraw", refuse)
    done = run(tmp_path, "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "1", steps=4)
    assert done.code == 0 and done.store.complete_steps() == [4, 2]
    assert "warning: an old checkpoint could not be deleted: Permission denied: an old file" in capsys.readouterr().out


def test_what_is_kept(tmp_path: Path):
    flags = ("--checkpoint.every_steps", "2", "--checkpoint.keep_last", "2", "--checkpoint.keep_every_steps", "4")
    assert run(tmp_path, *flags, steps=11).store.steps() == [11, 10, 8, 4]


@pytest.mark.parametrize("kind", ["asynchronous", "no_asynchronous"])
def test_how_long_the_loop_waits_is_in_the_record(kind: str, tmp_path: Path):
    done = run(tmp_path, *EVERY_THREE, f"--checkpoint.{kind}", steps=9)
    saves = done.record["checkpoints"]["saves"]
    assert [save["step"] for save in saves] == [3, 6, 9]
    assert all(save["bytes"] > 3 * 4 * 600_000 and 0 < save["waited_seconds"] <= save["seconds"] for save in saves)
    if kind == "no_asynchronous":
        assert all(save["waited_seconds"] == save["seconds"] for save in saves)
        assert all(window["disturbed_by"] != "saved" for window in done.record["timing"]["windows"])
    else:
        assert saves[0]["waited_seconds"] < saves[0]["seconds"]
        assert any(window["disturbed_by"] == "saved" for window in done.record["timing"]["windows"])


def test_nothing_is_saved_unless_it_is_asked_for(tmp_path: Path):
    done = run(tmp_path, steps=2)
    assert done.record["checkpoints"]["saves"] == [] and not (done.folder / "checkpoints").exists()


def test_a_crash_in_the_loop_finishes_what_is_being_written(tmp_path: Path, monkeypatch):
    """The error of the loop is the cause, and the checkpoint before it is complete."""
    from training.journal import Journal

    end_window = Journal.end_window

    def fail(self, disturbed_by):
        end_window(self, disturbed_by)
        if self.windows[-1].steps[-1].step == 4:
            raise ValueError("a fault was planted")

    monkeypatch.setattr(Journal, "end_window", fail)
    with pytest.raises(ValueError, match="planted"):
        train.main([*TINY, *EVERY_THREE, "--training.steps", "9", "--run.output_dir", str(tmp_path)])
    (record,) = tmp_path.glob("*/record.json")
    failed = ended(1, record.parent)
    assert failed.record["status"] == "failed" and "planted" in failed.record["cause"]
    assert failed.store.complete_steps() == [3] and os.path.exists(failed.at(3))
