"""A run that goes on is the run that was interrupted: same losses, same norms, same learning rates, same state, bit for bit."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch

from backends import get_backend
from recipes.base import Optimizer
from tests.durable import Ended, refused, run
from training.checkpoint_store import MARKER, CheckpointStore
from training.optimizer import build_optimizer
from training.run_state import prepare


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Ended:
    """20 steps without interruption, saved every five, over a text so short that epochs pass."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "texts").mkdir()
    words = random.Random(0)
    for number in range(8):
        text = " ".join(str(words.randrange(10_000)) for _ in range(25))
        (folder / "texts" / f"{number}.txt").write_text(text)
    done = run(folder / "runs", *data_of(folder), "--checkpoint.every_steps", "5", "--checkpoint.keep_last", "9")
    assert done.code == 0 and done.record["quality"]["epoch"] >= 1
    assert done.store.complete_steps() == [20, 15, 10, 5]
    return done


def data_of(folder: Path) -> tuple[str, ...]:
    texts = folder / "texts"
    return ("--data.source", "files", "--data.path", str(texts), "--data.held_out_every", "4")


def flags_of(straight: Ended) -> tuple[str, ...]:
    return (*data_of(straight.folder.parent.parent), "--checkpoint.every_steps", "5", "--checkpoint.keep_last", "9")


def test_c2_c7_c8_c12_any_number_of_resumes_is_the_straight_run(straight: Ended, tmp_path: Path):
    """Stopped at 5, at 10 and at 15 and gone on each time, in whatever epoch that is."""
    came_from, epochs = straight, []
    for stop in (5, 10, 15):
        came_from = run(tmp_path / "runs", *flags_of(straight), "--resume", came_from.at(stop))
        assert came_from.code == 0
        assert came_from.steps == straight.steps[stop:], "losses, gradient norms, learning rates and tokens are the same"
        assert came_from.state(20) == straight.state(20), "and so is everything that was saved"
        resumed = came_from.record["checkpoints"]["resumed_from"]
        assert resumed["step"] == stop and resumed["tokens_seen"] == 64 * stop
        assert came_from.manifest(20).data == straight.manifest(20).data
        epochs.append(straight.manifest(stop).data["epoch"])
        assert came_from.record["quality"]["epoch"] == straight.record["quality"]["epoch"]
    assert epochs[-1] >= 1


def test_latest_is_the_newest_complete_one_and_the_rest_is_named(straight: Ended, tmp_path: Path, capsys):
    shutil.copytree(straight.folder, tmp_path / "runs" / straight.folder.name)
    checkpoints = tmp_path / "runs" / straight.folder.name / "checkpoints"
    (checkpoints / "step-00000020" / MARKER).unlink()
    damaged = checkpoints / "step-00000015" / "__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    went_on = run(tmp_path / "runs", *flags_of(straight), "--resume")
    output = capsys.readouterr().out
    assert f"checkpoint skipped: {checkpoints}/step-00000020 was never finished" in output
    assert f"checkpoint skipped: {damaged}: damaged, its SHA-256 is not what {MARKER} says" in output
    assert went_on.steps == straight.steps[10:] and went_on.state(20) == straight.state(20)
    assert went_on.store.url == str(checkpoints), "a run that resumes saves where the one before it did"
    assert went_on.store.complete_steps() == [20, 15, 10, 5]
    assert not [path for path in checkpoints.rglob("*") if path.suffix in (".partial", ".tmp")]


def test_gone_back_to_an_older_one_another_history_begins(straight: Ended, tmp_path: Path, capsys):
    shutil.copytree(straight.folder, tmp_path / "runs" / straight.folder.name)
    before = CheckpointStore(str(tmp_path / "runs" / straight.folder.name / "checkpoints"))
    went_on = run(tmp_path / "runs", *flags_of(straight), "--resume", before.folder(5), steps=20)
    assert before.complete_steps() == [20, 15, 10, 5], "the first history stays what it is"
    assert went_on.store.url == str(went_on.folder / "checkpoints")
    assert went_on.store.complete_steps() == [20, 15, 10]
    assert "is newer than the checkpoint resumed from: this run saves to" in capsys.readouterr().out


def test_nothing_left_to_train(straight: Ended, tmp_path: Path, capsys):
    """A crash after the last save leaves a run that has only to be closed: the export, for example, is still to come."""
    shutil.copytree(straight.folder, tmp_path / "runs" / straight.folder.name)
    closed = run(tmp_path / "runs", *flags_of(straight), "--resume", "--checkpoint.export")
    assert closed.code == 0 and closed.steps == [] and closed.record["status"] == "finished"
    assert "step 20 of 20 was done before: there is nothing left to train" in capsys.readouterr().out
    assert (closed.folder / "checkpoints" / "hf" / "model.safetensors").is_file()
    card = (closed.folder / "checkpoints" / "hf" / "README.md").read_text()
    loss = straight.manifest(20).loss
    for row in (
        "| step | 20 |",
        "| recipe | debug |",
        f"| run | {closed.folder.name} |",
        "| tokens | 1,280 |",
        f"| loss | {loss:.4f} |",
    ):
        assert row in card


def test_auto_begins_where_there_is_nothing(tmp_path: Path, capsys):
    begun = run(tmp_path, "--resume", "auto", steps=2)
    assert begun.code == 0 and len(begun.steps) == 2 and begun.record["checkpoints"]["resumed_from"] is None
    assert "there is no complete checkpoint to go on from: beginning at step 1" in capsys.readouterr().out


def test_refusals(straight: Ended, tmp_path: Path, capsys):
    def refuse(*flags: str, **more) -> str:
        return refused(capsys, tmp_path / "none", *flags_of(straight), *flags, **more)

    def at(step: int) -> str:
        return straight.at(step)

    (tmp_path / "none").mkdir()
    assert "no complete checkpoint of debug in" in refuse("--resume") and "--resume auto" in refuse("--resume")
    assert "/nowhere', which holds no complete checkpoint; allowed: latest, auto, a run's folder" in refuse(
        "--resume", "/nowhere"
    )
    assert f"{at(7)} does not exist; complete there: {at(20)}, {at(15)}" in refuse("--resume", at(7))
    assert "optimizer.lr was 0.001, is 0.5. Use the same recipe" in refuse("--resume", at(5), "--optimizer.lr", "0.5")
    both = refuse("--resume", at(5), "--run.seed", "3", "--model.ffn_dim", "64")
    assert "model.ffn_dim was None, is 64; run.seed was 0, is 3" in both
    assert "training.steps was 20, is 30" in refuse("--resume", at(5), steps=30)
    assert "training.stepz, which is no field" in refuse("--resume", at(5), "--allow-change", "training.stepz")
    tokens = refuse("--resume", at(5), "--training.global_batch_size", "4")
    assert "tokens per step were 64 (on 1 ranks), are 128 (on 1); set training.global_batch_size to 2" in tokens
    changed = refuse("--resume", at(5), "--data.held_out_every", "5", "--allow-change", "data.held_out_every")
    assert "cannot resume the data: data.held_out_every was 4, got 5" in changed
    shape = refuse("--resume", at(5), "--model.ffn_dim", "64", "--allow-change", "model.ffn_dim")
    assert "step-00000005 cannot be loaded: rank 0: " in shape and "size" in shape.lower()
    assert "keep_last: got 0, allowed: more than 0" in refuse("--checkpoint.keep_last", "0")
    others = refuse("--checkpoint.folder", straight.store.url)
    assert f"checkpoint.folder: {at(20)} is there already; go on from it with --resume" in others


def test_what_may_change(straight: Ended, tmp_path: Path):
    """Longer than it was planned, if that is said; watched otherwise, and in other micro-batches, without a word."""
    flags = (
        "--resume",
        straight.at(15),
        "--allow-change",
        "training.steps",
        "--run.log_every",
        "1",
        "--validation.every_steps",
        "9",
    )
    longer = run(
        tmp_path, *flags_of(straight), *flags, "--training.local_batch_size", "1", "--training.global_batch_size", "2", steps=22
    )
    assert longer.code == 0 and [step["step"] for step in longer.steps] == [*range(16, 23)]
    assert longer.steps[0]["loss"] == pytest.approx(straight.steps[15]["loss"], rel=1e-5)


def test_c4_a_missing_state_is_named(straight: Ended, tmp_path: Path, capsys):
    """The message names the key of that rank."""
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    shutil.copytree(straight.at(5), store.folder(5))
    path = Path(store.folder(5), ".metadata")
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["random.rank0.cpu"]
    path.write_bytes(pickle.dumps(metadata))
    manifest = json.loads(Path(store.folder(5), MARKER).read_text())
    manifest["files"].pop(".metadata")
    Path(store.folder(5), MARKER).write_text(json.dumps(manifest))
    line = refused(capsys, tmp_path, *flags_of(straight), "--resume", store.folder(5))
    assert "step-00000005 cannot be loaded: rank 0: " in line and "random.rank0.cpu" in line


def test_random_numbers_go_on(tmp_path: Path):
    """Of torch and of Python, whatever draws from them."""
    from torch import nn

    from training.run_state import RunState

    model = nn.Linear(2, 2)
    state = RunState(model, torch.optim.AdamW(model.parameters()), get_backend("cpu"))
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    expected = random.random(), random.gauss(0, 1), torch.rand(3)
    random.seed(5)
    torch.manual_seed(5)
    state._set_random(saved)
    drawn = random.random(), random.gauss(0, 1), torch.rand(3)
    assert drawn[:2] == expected[:2] and torch.equal(drawn[2], expected[2])


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_the_optimizer_is_prepared_as_its_first_step_would(implementation: str):
    from torch import nn

    settings = Optimizer(implementation=implementation)  # type: ignore[arg-type]
    states = []
    for take_step in (True, False):
        model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        optimizer, _ = build_optimizer(model, settings, ("fused", "foreach", "loop"))
        if take_step:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        else:
            prepare(optimizer)
        states.append([optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]])
    for stepped, prepared in zip(*states, strict=True):
        assert stepped.keys() == prepared.keys()
        for name in stepped:
            assert (stepped[name].shape, stepped[name].dtype, stepped[name].device) == (
                (prepared[name].shape, prepared[name].dtype, prepared[name].device)
            )


def test_an_object_store(tmp_path: Path, monkeypatch):
    """Any file system that fsspec knows: here one in memory, which cannot rename folders or sync."""
    flags = ("--checkpoint.every_steps", "4", "--checkpoint.folder", f"memory://{tmp_path.name}")
    # A real one does not even know empty folders.
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.makedirs", lambda self, path, exist_ok: None)
    whole = run(tmp_path / "a", *flags[:2], steps=8)
    first = run(tmp_path / "b", *flags, steps=8)
    assert first.code == 0 and first.store.complete_steps() == [8, 4]
    first.store.withdraw(8)
    second = run(tmp_path / "b", *flags, "--resume", steps=8)
    assert second.steps == whole.steps[4:] and second.state(8) == whole.state(8)
    first.store.files.rm(first.store.root, recursive=True)


def test_after_a_restart_only_runs_of_that_launch_count(straight: Ended, tmp_path: Path, monkeypatch, capsys):
    """The launcher's names repeat: a launch of yesterday with the same name is not gone on from."""
    runs = tmp_path / "runs"
    shutil.copytree(straight.folder, runs / straight.folder.name)
    record = json.loads((runs / straight.folder.name / "record.json").read_text())

    def earlier(**identity: str) -> None:
        changed = record | {"identity": record["identity"] | identity}
        (runs / straight.folder.name / "record.json").write_text(json.dumps(changed))

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "debug")
    began = datetime.fromisoformat(record["started_utc"]).timestamp()

    def steps_after(launched_at: float, *flags: str) -> list[int]:
        monkeypatch.setattr("training.resume.launcher_began", lambda: launched_at)
        done = run(tmp_path / "runs", *flags_of(straight), *flags, "--checkpoint.every_steps", "0", steps=20)
        shutil.rmtree(done.folder)
        return [step["step"] for step in done.steps]

    (runs / straight.folder.name / "checkpoints" / "step-00000020" / MARKER).unlink()
    earlier(launch="debug")
    assert steps_after(began - 5) == [*range(16, 21)]
    assert steps_after(began + 60) == [*range(1, 21)], "launched after that run began"
    assert "there is no complete checkpoint to go on from: beginning at step 1" in capsys.readouterr().out
    earlier(launch="another")
    assert steps_after(began - 5) == [*range(1, 21)]
    # A launch that was asked to resume, and died before its first save, is asked again.
    assert steps_after(began + 60, "--resume", straight.at(10)) == [*range(11, 21)]


def test_when_the_launcher_began():
    from training.world import launcher_began

    began = launcher_began()
    assert began is not None and 0 < time.time() - began < 7 * 24 * 3600
