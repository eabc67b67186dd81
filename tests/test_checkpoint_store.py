"""Which checkpoints are complete, which are skipped by name, and which may go. No torch needed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.checkpoint_store import MARKER, CheckpointError, CheckpointStore, Damaged, Manifest

MANIFEST = Manifest(
    step=0,
    run="20261203-120000-debug-abcdef",
    created_utc="2026-12-03T12:00:00+00:00",
    recipe={"name": "debug"},
    versions={"torch": "2.13.0"},
    world_size=1,
    layout={},
    tokens_per_step=64,
    data={"seen": {"tokens_seen": 0}},
)


def put(store: CheckpointStore, step: int, *, finished: bool = True) -> Path:
    """Write two files as a checkpoint, and its marker if it is finished."""
    files = {"__0_0.distcp": b"weights" * step, ".metadata": b"where they are"}
    store.files.makedirs(store.folder(step), exist_ok=True)
    for name, data in files.items():
        store.files.pipe_file(f"{store.folder(step)}/{name}", data)
    if finished:
        listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
        store.mark_complete(replace(MANIFEST, step=step, files=listed))
    return Path(store.folder(step))


@pytest.fixture(params=["folder", "object store"])
def store(request, tmp_path: Path):
    if request.param == "folder":
        yield CheckpointStore(str(tmp_path / "checkpoints"))
        return
    store = CheckpointStore(f"memory://{tmp_path.name}/checkpoints")
    yield store
    store.files.rm(store.root, recursive=True)


def test_the_newest_complete_one_comes_first_and_the_others_are_skipped_by_name(store: CheckpointStore):
    for step in (5, 10, 15):
        put(store, step)
    put(store, 20, finished=False)
    notes: list[str] = []
    assert [manifest.step for manifest in store.candidates(notes.append)] == [15, 10, 5]
    assert notes == [f"checkpoint skipped: {store.url}/step-00000020 was never finished (it has no {MARKER})"]
    assert store.complete_steps() == [15, 10, 5] and store.steps() == [20, 15, 10, 5]
    manifest = store.read(10)
    assert manifest is not None and manifest.bytes == 70 + 14
    store.verify(10, manifest)


DAMAGES = {
    "truncated": ("__0_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-1]), "69 bytes, should be 70"),
    "missing rank file": ("__0_0.distcp", Path.unlink, f"missing, although {MARKER} lists it"),
    "missing metadata": (".metadata", Path.unlink, f"missing, although {MARKER} lists it"),
    "empty marker": (MARKER, lambda path: path.write_bytes(b""), "Expecting value"),
    "half a marker": (MARKER, lambda path: path.write_bytes(path.read_bytes()[:200]), "Unterminated|Expecting|delimiter"),
    "marker of the future": (MARKER, lambda path: path.write_text('{"format_version": 2}'), "format_version 2, allowed: 1"),
    "marker of something else": (MARKER, lambda path: path.write_text("[]"), "format_version None"),
    "not a marker's text": (MARKER, lambda path: path.write_bytes(b"\xff\xfe\x00"), "decode|utf"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_skipped_by_the_name_of_its_file(kind: str, tmp_path: Path):
    name, damage, said = DAMAGES[kind]
    store = CheckpointStore(str(tmp_path))
    put(store, 5)
    damage(put(store, 10) / name)
    notes: list[str] = []
    assert [manifest.step for manifest in store.candidates(notes.append)] == [5]
    (note,) = notes
    assert note.startswith(f"checkpoint skipped: {tmp_path}/step-00000010/{name}: ")
    with pytest.raises(Damaged, match=said):
        store.read(10)
    assert store.complete_steps() == [5]


def test_a_flipped_byte_is_found_by_whoever_has_that_file(store: CheckpointStore):
    put(store, 10)
    path = f"{store.folder(10)}/__0_0.distcp"
    data = bytearray(store.files.cat_file(path))
    data[33] ^= 1
    store.files.pipe_file(path, bytes(data))
    manifest = store.read(10)
    assert manifest is not None
    store.verify(10, manifest, share=0, shares=2)  # .metadata
    with pytest.raises(Damaged, match=r"step-00000010/__0_0.distcp: damaged, its SHA-256"):
        store.verify(10, manifest, share=1, shares=2)


def test_a_file_that_cannot_be_read_is_named(store: CheckpointStore, monkeypatch):
    put(store, 10)
    manifest = store.read(10)
    assert manifest is not None

    def refuse(path: str, mode: str):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(store.files, "open", refuse)
    with pytest.raises(Damaged, match=r"step-00000010/\.metadata: Permission denied"):
        store.verify(10, manifest)


@given(
    steps=st.sets(st.integers(1, 40), max_size=12),
    unfinished=st.sets(st.integers(1, 40), max_size=4),
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 1, 5, 10]),
)
def test_what_is_retired(steps: set[int], unfinished: set[int], keep_last: int, keep_every: int):
    store = CheckpointStore("memory://retired")
    for step in steps:
        put(store, step)
    for step in unfinished - steps:
        put(store, step, finished=False)
    gone = set(store.retire(keep_last, keep_every))
    left = set(store.steps())
    try:
        assert left == (steps | unfinished) - gone
        if not steps:
            assert not gone, "nothing goes before its successor is complete"
        else:
            assert set(sorted(steps)[-keep_last:]) <= left <= steps
            assert {step for step in steps if keep_every and step % keep_every == 0} <= left
            assert left == set(store.complete_steps())
    finally:
        if store.files.exists(store.root):
            store.files.rm(store.root, recursive=True)


def test_a_crash_while_one_is_deleted_leaves_nothing_that_counts(tmp_path: Path, monkeypatch):
    store = CheckpointStore(str(tmp_path))
    put(store, 5)
    monkeypatch.setattr(store.files, "rm", lambda *_, **__: (_ for _ in ()).throw(OSError("the power went")))
    with pytest.raises(OSError):
        store.withdraw(5)
    assert store.steps() == [5] and store.complete_steps() == [] and store.read(5) is None


def test_a_marker_is_replaced_in_one_move_and_leaves_nothing_beside_it(tmp_path: Path, monkeypatch):
    store = CheckpointStore(str(tmp_path))
    folder = put(store, 5)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", MARKER]
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the power went")))
    with pytest.raises(OSError):
        put(store, 10)
    assert store.read(10) is None


def test_a_damaged_one_goes_when_a_newer_one_is_complete(tmp_path: Path):
    store = CheckpointStore(str(tmp_path))
    put(store, 5)
    (put(store, 10) / ".metadata").unlink()
    assert [manifest.step for manifest in store.candidates(lambda note: None)] == [5]
    put(store, 15)
    assert store.retire(keep_last=3) == [10]


def test_other_names_and_places_are_left_alone(tmp_path: Path):
    for name in ("step-5", "step-abc", "notes", ".step-00000005"):
        (tmp_path / name).mkdir()
    store = CheckpointStore(str(tmp_path))
    put(store, 100_000_000)  # nine digits
    assert store.steps() == [100_000_000]
    store.retire(1)
    assert len(list(tmp_path.iterdir())) == 5
    assert CheckpointStore(str(tmp_path / "nowhere")).steps() == []
    (tmp_path / "file").write_text("")
    assert CheckpointStore(str(tmp_path / "file")).steps() == []


def test_free_space_and_unknown_protocols(tmp_path: Path):
    assert CheckpointStore("memory://x").free_bytes() is None
    free = CheckpointStore(str(tmp_path / "not" / "yet")).free_bytes()
    assert free is not None and free > 0
    with pytest.raises(CheckpointError, match=r"checkpoint.folder: got 'nope://x', which cannot be opened: .*nope"):
        CheckpointStore("nope://x")


def test_a_marker_reads_back():
    manifest = replace(MANIFEST, step=3, loss=1.5, files={"a": {"bytes": 1, "sha256": "0"}})
    assert Manifest.parse(manifest.text()) == manifest
    text = json.loads(manifest.text())
    del text["step"], text["data"]
    with pytest.raises(ValueError, match="lacks data, step"):
        Manifest.parse(json.dumps(text))
