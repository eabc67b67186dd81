"""Precompiling: what it fills is found by the next run, also on another machine, and what is not found is explained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from backends import get_backend
from ledger.command_line import main as ledger
from recipes.base import RecipeError
from recipes.debug import RECIPE
from tests import simulated_neuron
from tests.ranks import ROOT
from tests.test_train import TINY
from training.compile_cache import graph_facts, remember_fill, require_cached, require_usable, what_differs
from training.record import RunFailed
from training.report import Report

ARGUMENTS = [*TINY, "--training.steps", "6", "--validation.every_steps", "3", "--validation.num_batches", "1"]


def launch(command: list[str], environment: dict[str, str]) -> str:
    """Run to a good end and return what was said."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def newest(folder: Path) -> dict[str, Any]:
    return json.loads(max(folder.glob("2*/record.json"), key=lambda path: path.stat().st_mtime_ns).read_text())


def test_b9_b10_b17_on_the_cpu(tmp_path: Path, capsys):
    """Fill, pack, wipe, unpack, run: nothing is compiled. Then one entry is cut off."""
    cache, runs, file = tmp_path / "cache", tmp_path / "runs", tmp_path / "cache.zip"
    command = [sys.executable, "train.py", *ARGUMENTS, "--run.mode", "compile", "--run.output_dir", str(runs)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    said = launch([*command, "--precompile"], environment)
    assert "found again, none missing" in said and said.count(f"{cache}, ") >= 2, "each run says where the cache is"
    filled = [json.loads(path.read_text()) for path in sorted(runs.glob("precompiled/*/record.json"))]
    assert [record["compile"]["cache"]["state"] for record in filled] == ["cold", "warm"]
    assert [record["quality"]["steps_recorded"] for record in filled] == [2, 2] and not list(runs.glob("2*"))

    there = ["--directory", str(cache)]
    assert ledger(["cache", "pack", str(file), *there]) == 0
    shutil.rmtree(cache)
    assert ledger(["cache", "unpack", str(file), *there]) == 0
    launch([*command, "--compile.require_cached"], environment)
    record = newest(runs)
    assert record["status"] == "finished" and record["compile"]["late_compiles"] == []
    assert (record["compile"]["cache"]["misses"], record["compile"]["cache"]["state"]) == (0, "warm")
    directories = {each["compile"]["cache"][when]["directory"] for each in (*filled, record) for when in ("before", "after")}
    assert directories == {str(cache)}, "an absolute path, the same in each"
    before, after = (filled[number]["timing"]["first_step_seconds"] for number in (0, 1))
    assert record["timing"]["first_step_seconds"] < (before + after) / 2, "the kernels came along, not their description alone"

    kernel = next(cache.rglob("*.main.so"))
    kernel.write_bytes(kernel.read_bytes()[:100])
    assert "compile cache: 1 damaged entries removed" in launch(command, environment)
    assert newest(runs)["compile"]["cache"]["repaired"] == 1 and newest(runs)["status"] == "finished"


@pytest.mark.distributed
def test_b9_on_the_stand_in(tmp_path: Path, capsys):
    """Two ranks that torchrun started, eager: there every operator is compiled, and kept."""
    runs, file = tmp_path / "runs", tmp_path / "cache.zip"
    environment = simulated_neuron.environment(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.simulated_neuron.train", *ARGUMENTS, "--run.device", "neuron"]
    command += ["--parallel.ranks", "2", "--run.output_dir", str(runs)]
    assert "found again, none missing" in launch([*command, "--precompile"], environment)
    cache = Path(environment["TORCH_NEURONX_NEFF_CACHE_DIR"])
    there = ["--device", "neuron", "--directory", str(cache)]
    assert ledger(["cache", "pack", str(file), *there]) == 0
    shutil.rmtree(cache)
    assert ledger(["cache", "unpack", str(file), *there]) == 0, capsys.readouterr().err
    launch([*command, "--compile.require_cached"], environment)
    used = newest(runs)["compile"]["cache"]
    assert (used["misses"], used["state"]) == (0, "warm") and used["hits"] > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["debug"], "--precompile: nothing is compiled in eager mode on cpu; add --run.mode compile"),
        (["debug", "--run.mode", "compile", "--compile.backend", "aot_eager"], "'aot_eager' keeps nothing, allowed: inductor"),
        (["debug", "--run.mode", "compile", "--resume"], "got --resume latest, but nothing is trained"),
        (["debug", "--training.steps", "0"], "training.steps: got 0"),
    ],
)
def test_what_cannot_be_precompiled_is_refused(arguments: list[str], message: str, capsys):
    assert train.main([*arguments, "--precompile"]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys):
    arguments = ["qwen3_32b_trn2_compiled", "--run.output_dir", str(tmp_path), "--precompile", "--dry-run"]
    assert train.main(arguments) == 0, "the launcher asks before it starts the ranks"
    assert "run.mode = 'compile'" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_run_that_dies_ends_it_with_its_code(tmp_path: Path, capfd):
    arguments = [*TINY, "--run.mode", "compile", "--run.output_dir", str(tmp_path), "--data.source", "text"]
    arguments += ["--data.path", str(tmp_path / "nothing.txt")]
    assert train.main([*arguments, "--precompile"]) == 2
    assert "run 2 of 2" not in capfd.readouterr().out


# --- a cache that was filled for something else -------------------------------------------------------------------------


def test_b9_the_differing_field_is_named(tmp_path: Path):
    cpu = get_backend("cpu")
    facts = graph_facts(RECIPE, cpu)
    assert what_differs(tmp_path, facts) == f"{tmp_path} has not been filled by `train.py RECIPE --precompile`"
    remember_fill(tmp_path, graph_facts(replace(RECIPE, model=replace(RECIPE.model, ffn_dim=4096)), cpu))
    remember_fill(tmp_path, facts | {"version of torch": "2.12.0", "training.seq_len": 9})
    longer = graph_facts(replace(RECIPE, model=replace(RECIPE.model, ffn_dim=2048)), cpu)
    assert what_differs(tmp_path, longer) == "model.ffn_dim was 4096, is 2048", "the nearest of those it was filled for"
    remember_fill(tmp_path, facts)
    assert what_differs(tmp_path, facts).startswith("recipe, versions, flags and commit are those")
    seeds = graph_facts(replace(RECIPE, run=replace(RECIPE.run, seed=7), training=replace(RECIPE.training, steps=5)), cpu)
    assert seeds == facts, "what decides no graph is left out"
    (tmp_path / ".filled.json").write_text("[1, {")
    assert "has not been filled" in what_differs(tmp_path, facts)


def test_a_run_that_relies_on_its_cache():
    require_cached([(3, 0), (3, 0)], None, {})
    with pytest.raises(RunFailed, match=r"2 graphs were compiled that the cache did not have: .* has not been filled"):
        require_cached([(3, 0), (1, 2)], "/nowhere", {})
    with pytest.raises(RunFailed, match="does not count"):
        require_cached([(3, 0), (None, None)], None, {})
    with pytest.raises(RunFailed, match="was not asked for anything"):
        require_cached([(0, 0)], None, {})


def test_b14_a_cache_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for place, message in ((f"{tmp_path}/file/cache", "cannot be kept"), ("s3://bucket/cache", "allowed: a folder")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
        with pytest.raises(RecipeError, match=f"TORCHINDUCTOR_CACHE_DIR: got '{place}'.*{message}"):
            require_usable(get_backend("cpu"))
        arguments = [*TINY, "--run.mode", "compile", "--run.output_dir", str(tmp_path / "runs")]
        assert train.main(arguments) == 2 and not (tmp_path / "runs").exists()
    assert train.main([*TINY, "--training.steps", "2", "--run.output_dir", str(tmp_path / "runs")]) == 0, "eager asks for none"


def test_b19_a_cache_that_keeps_nothing_is_said():
    said: list[str] = []
    journal = SimpleNamespace(console=SimpleNamespace(note=said.append))
    recipe = SimpleNamespace(compile=SimpleNamespace(require_cached=False))
    report: Any = SimpleNamespace(journal=journal, recipe=recipe)

    def look(misses: int | None, before: int | None, after: int | None) -> None:
        cache = {"repaired": 0, "misses": misses, "before": {"files": before}, "after": {"files": after, "directory": "/cache"}}
        Report._account_for_cache(report, cache)

    look(3, 0, 6)
    look(0, 6, 6)
    look(None, 0, 0)
    look(3, None, None)
    assert not said
    look(3, 2, 2)
    assert said == ["warning: 3 graphs were compiled and nothing was kept in /cache; the next run compiles them again"]


def test_b21_a_users_own_cache_folder_stays(tmp_path: Path, monkeypatch):
    neuron = get_backend("neuron")
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path))
    found = {variable.name: variable for variable in neuron.set_environment()}["TORCH_NEURONX_NEFF_CACHE_DIR"]
    assert (found.value, found.set_by) == (str(tmp_path), "user") and os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == str(
        tmp_path
    )
