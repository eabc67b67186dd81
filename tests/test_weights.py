"""A folder of weights says what it holds, is written whole or not at all, and is refused when damaged."""

from __future__ import annotations

import json
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM as Reference

from models.qwen3 import state_dict_adapter as adapter
from models.qwen3.config import FLAVORS
from models.qwen3.model import Qwen3
from recipes.base import RecipeError
from training.initialise import initialise
from training.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightsError,
    export_weights,
    load_weights,
    provenance,
    read_safetensors,
    weights_folder,
    write_safetensors,
)

TINY = FLAVORS["tiny"]


def build(seed: int = 0) -> Qwen3:
    model = Qwen3(TINY)
    initialise(model.initialisation(), seed=seed)
    return model


def export(model: Qwen3, folder: Path, **kwargs: Any) -> Path:
    export_weights(model, adapter, folder, **{"step": 3, **kwargs})
    return folder


# --- what the exported folder says ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "start", "note"),
    [
        (0, None, "random init, step 0"),
        (60, None, "trained from random init, step 60"),
        (0, "weights/base", "weights/base unchanged, step 0"),
        (60, "weights/base", "trained from weights/base, step 60"),
    ],
)
def test_d14_export_says_what_the_weights_have_been_through(step: int, start: str | None, note: str, tmp_path: Path):
    assert provenance(step, start) == note
    folder = export(build(), tmp_path / "out", step=step, start=start, facts={"recipe": "debug"})
    with safe_open(folder / SINGLE_FILE, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": str(step), "note": note, "recipe": "debug"}
    card = (folder / "README.md").read_text()
    assert f"\n{note}\n" in card
    assert f"{TINY.num_parameters:,} parameters" in card
    assert "| recipe | debug |" in card


def test_card_promises_what_works(tmp_path: Path):
    folder = export(build(), tmp_path / "out")
    code = "\n".join(line.strip() for line in (folder / "README.md").read_text().splitlines() if line.startswith("    "))
    scope: dict[str, Any] = {}
    exec(code.replace("this folder", str(folder)), scope)
    assert type(scope["model"]) is Reference


def test_tokenizer_is_saved_into_the_same_folder(tmp_path: Path):
    folder = export(build(), tmp_path / "out", save_tokenizer=lambda path: (path / "tokenizer.json").write_text("{}"))
    assert {path.name for path in folder.iterdir()} == {SINGLE_FILE, "config.json", "README.md", "tokenizer.json"}


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
def test_c13_file_dtype_is_the_asked_dtype(held: torch.dtype, asked: torch.dtype, tmp_path: Path):
    folder = export(build().to(held), tmp_path / "out", dtype=asked, max_shard_bytes=100_000)
    tensors = read_safetensors(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {asked}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == str(asked).removeprefix("torch.")


def test_weights_of_the_hub_are_fetched_in_turn(tmp_path: Path, monkeypatch):
    """A folder is a folder. What else looks like a hub id is asked for there, by one rank of a host after the other."""
    folder, turns = export(build(), tmp_path / "hub" / "model"), []

    @contextmanager
    def turn():
        turns.append("mine")
        yield

    def download(name: str, allow_patterns: list[str]) -> str:
        assert (name, allow_patterns) == ("Qwen/Qwen3-0.6B", ["*.safetensors", "*.json"]) and turns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert weights_folder("Qwen/Qwen3-0.6B", turn()) == folder and turns == ["mine"]
    model = build(seed=9)
    load_weights(model, adapter, weights_folder("Qwen/Qwen3-0.6B", turn()))
    assert torch.equal(model.output.weight, build().output.weight)
    for local in (str(folder), "./Qwen/Qwen3", "/nowhere", "no_such_folder", "deep/er/folder"):
        assert weights_folder(local) == Path(local)


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    def refuse(name: str, **_: object) -> str:
        raise OSError("we could not connect\nand here is a page about it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(WeightsError) as refused:
        weights_folder("Qwen/Qwen3-0.7B")
    assert "got 'Qwen/Qwen3-0.7B', which is no folder here, and the hub says: we could not connect; check" in str(refused.value)
    assert "page" not in str(refused.value)


# --- files ----------------------------------------------------------------------------------------------------------------


def test_integers_keep_their_dtype(tmp_path: Path):
    write_safetensors(tmp_path / "out", {"a": torch.ones(3), "n": torch.arange(3)}, dtype=torch.bfloat16)
    state = read_safetensors(tmp_path / "out")
    assert (state["a"].dtype, state["n"].dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize("max_shard_bytes", [1_000, 40], ids=["single", "sharded"])
def test_shared_storage_is_written_in_full_under_every_name(max_shard_bytes: int, tmp_path: Path):
    whole = torch.arange(10, dtype=torch.float32)
    state = {"whole": whole, "again": whole, "part": whole[2:5], "every_second": whole[::2]}
    write_safetensors(tmp_path / "out", state, max_shard_bytes=max_shard_bytes)
    back = read_safetensors(tmp_path / "out")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_shards_stay_below_the_limit_unless_one_tensor_is_larger(tmp_path: Path):
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(100), "d": torch.ones(8), "e": torch.ones(1)}
    write_safetensors(tmp_path / "out", state, max_shard_bytes=32)
    shards = [sorted(load_file(path)) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert shards == [["a", "b"], ["c"], ["d"], ["e"]]


def test_tensor_without_data_is_not_written(tmp_path: Path):
    with pytest.raises(WeightsError, match="b: on the meta device"):
        write_safetensors(tmp_path / "out", {"a": torch.ones(1), "b": torch.ones(1, device="meta")})
    assert not list(tmp_path.iterdir())


def test_failed_export_leaves_nothing_behind(tmp_path: Path):
    def fail(folder: Path) -> None:
        assert (folder / SINGLE_FILE).exists()
        assert not (tmp_path / "out").exists()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export(build(), tmp_path / "out", save_tokenizer=fail)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_not_overwritten(tmp_path: Path):
    folder = export(build(), tmp_path / "new" / "empty")
    before = (folder / SINGLE_FILE).read_bytes()
    with pytest.raises(WeightsError, match="already there, allowed: a new or an empty folder"):
        export(build(seed=1), folder)
    assert (folder / SINGLE_FILE).read_bytes() == before
    (tmp_path / "empty").mkdir()
    export(build(), tmp_path / "empty")


@pytest.mark.skipif(os.name != "posix", reason="permission bits of POSIX systems")
def test_files_are_as_readable_as_their_folder(tmp_path: Path):
    folder = export(build(), tmp_path / "out")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {stat.S_IMODE(folder.stat().st_mode) & 0o666}


def _without_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _with_torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def _with_pickled_weights(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _without_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def _with_a_torn_shard(folder: Path) -> None:
    path = next(folder.glob("model-00002*"))
    path.write_bytes(path.read_bytes()[:-4])


def _with_a_pointer_for_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).write_text("version https://git-lfs.github.com/spec/v1\n")


def _with_a_shard_that_lacks_a_tensor(folder: Path) -> None:
    path = next(folder.glob("model-00002*"))
    state = load_file(path)
    state.popitem()
    path.unlink()
    save_file(state, path)


def _with_an_index_of_nothing(folder: Path) -> None:
    (folder / INDEX_FILE).write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_folder, "no such folder"),
        (_without_config, "config.json: missing"),
        (_with_torn_config, "config.json: not JSON"),
        (_with_pickled_weights, "pytorch_model.bin, allowed: model.safetensors or model.safetensors.index.json"),
        (_without_a_shard, "missing, although model.safetensors.index.json lists it"),
        (_with_a_torn_shard, "not a complete safetensors file"),
        (_with_a_pointer_for_a_shard, "not a complete safetensors file"),
        (_with_a_shard_that_lacks_a_tensor, "which model.safetensors.index.json promises"),
        (_with_an_index_of_nothing, "no weight_map"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_damaged_folder_is_refused_in_one_line(damage: Any, message: str, tmp_path: Path):
    folder = export(build(), tmp_path / "out", max_shard_bytes=100_000)
    damage(folder)
    with pytest.raises(WeightsError) as caught:
        load_weights(build(), adapter, folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RecipeError)
