"""What the doctor says of a machine: one line each, with the fix."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from preflight import doctor
from preflight.command_line import main
from preflight.doctor import examine
from recipes import command_line

DEBUG = command_line.load("debug")


def checks(recipe=DEBUG, instance=None):
    return {check.name: check for check in examine(recipe, instance)}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Backends set variables; the test's own are put back, and runs go to an empty folder."""
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_FLAGS", "NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES", "NNODES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "neff"))
    monkeypatch.chdir(tmp_path)


def test_a_laptop_is_ready_for_the_debug_recipe():
    found = checks()
    assert {name: check.status for name, check in found.items() if check.status == "failure"} == {}
    assert {"python", "torch", "cpu", "cache", "runs", "time-out", "tokenizer", "data", "clock"} <= set(found)


def test_a_laptop_is_told_at_once_that_it_has_no_trainium(capsys: pytest.CaptureFixture[str]):
    """Case B26."""
    found = checks(tiny_on_neuron())["neuron"]
    assert found.status == "failure"
    assert "not usable here" in found.text and "--run.device cpu" in found.fix
    assert main(["--doctor", "qwen3_8b_trn2", "--tiny", "--run.device", "neuron"]) == 1
    assert "--run.device cpu" in capsys.readouterr().out


def tiny_on_neuron(ranks: int = 4):
    recipe = command_line.load("qwen3_8b_trn2").tiny()
    return replace(recipe, run=replace(recipe.run, device="neuron"), parallel=replace(recipe.parallel, ranks=ranks))


def test_chip_physical_and_logical_cores_are_named_apart():
    """Case E6."""
    cores = checks(tiny_on_neuron(), "trn2.3xlarge")["cores"]
    assert cores.status == "ok"
    assert "1 chip, 8 physical cores, 4 logical cores at LNC=2" in cores.text


def test_ranks_are_held_against_logical_cores():
    """Case E9."""
    cores = checks(tiny_on_neuron(8), "trn2.48xlarge")["cores"]
    assert cores.status == "failure"
    assert "8 ranks on 16 chips, 128 physical cores, 64 logical cores" in cores.text and "start 64 ranks" in cores.fix
    assert checks(tiny_on_neuron(64), "trn2.48xlarge")["cores"].status == "ok"


def test_runtime_and_compiler_have_one_lnc(monkeypatch: pytest.MonkeyPatch):
    """Case E8."""
    monkeypatch.setenv("NEURON_CC_FLAGS", "--verbose 1 --lnc=1")
    lnc = checks(tiny_on_neuron(), "trn2.3xlarge")["LNC"]
    assert lnc.status == "failure" and "the runtime takes 2" in lnc.text and "the compiler 1" in lnc.text
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert checks(tiny_on_neuron(8), "trn2.3xlarge")["LNC"].status == "ok"


def test_a_folder_without_space_and_one_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "_RUN_BYTES", 2**80)
    runs = checks()["runs"]
    assert runs.status == "warning" and "GiB free" in runs.text and runs.fix
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    runs = checks(replace(DEBUG, run=replace(DEBUG.run, output_dir=str(tmp_path / "deep" / "runs"))))["runs"]
    assert runs.status == "failure" and str(tmp_path) in runs.text


def test_a_time_out_that_a_known_first_step_would_not_meet():
    recipe = command_line.load("qwen3_32b_trn2_compiled")
    short = replace(recipe, comm=replace(recipe.comm, first_step_timeout_seconds=300.0))
    timeout = doctor._timeout(short)
    assert timeout.status == "warning"
    assert "255.7 s (published, qwen3_32b_trn2_compiled)" in timeout.text
    assert timeout.fix == "--comm.first_step_timeout_seconds 511"
    assert doctor._timeout(recipe).status == "ok"


def test_a_tokenizer_and_data_that_are_not_there():
    recipe = replace(DEBUG, data=replace(DEBUG.data, source="files", path="no/such/folder", tokenizer="no/such/tokenizer.json"))
    found = checks(recipe)
    assert found["data"].status == "failure" and "no/such/folder" in found["data"].text
    assert found["tokenizer"].status == "failure" and "no/such/tokenizer.json" in found["tokenizer"].text


def test_a_clock_in_the_past(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock = doctor._clock()
    assert clock.status == "failure" and clock.text.startswith("1970-01-01")


def test_an_unknown_instance_names_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["--doctor", "--instance", "trn9.large"]) == 2
    assert "'trn9.large', allowed: trn2.3xlarge, trn2.48xlarge" in capsys.readouterr().err
