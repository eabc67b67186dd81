"""Chips, physical cores and logical cores are told apart, and ranks that do not fit are refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends import BackendUnavailable
from backends.neuron import NeuronBackend
from backends.neuron_cores import logical_cores, problem_with_ranks


@pytest.fixture(autouse=True)
def no_neuron_variables(monkeypatch: pytest.MonkeyPatch):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NEURON_")}
    monkeypatch.setattr(os, "environ", kept)


@pytest.mark.parametrize(
    ("chips", "lnc", "cores", "words"),
    [
        # E6: a trn2.3xlarge is one chip with 8 physical and 4 logical cores, not four devices.
        (1, None, 4, "1 chip, 8 physical cores, 4 logical cores at LNC=2"),
        (1, "1", 8, "1 chip, 8 physical cores, 8 logical cores at LNC=1"),
        (16, None, 64, "16 chips, 128 physical cores, 64 logical cores at LNC=2"),
        (16, "1", 128, "16 chips, 128 physical cores, 128 logical cores at LNC=1"),
    ],
)
def test_e6_all_three_are_named(chips: int, lnc: str | None, cores: int, words: str):
    if lnc:
        os.environ["NEURON_LOGICAL_NC_CONFIG"] = lnc
    assert logical_cores("Trainium2", chips) == (cores, words)


def test_e9_ranks_and_cores_must_be_equally_many():
    problem = problem_with_ranks(8, "Trainium2", 16)
    assert problem is not None
    assert "got 8, allowed: 64, one for each logical core (16 chips, 128 physical cores, 64 logical cores at LNC=2)" in problem
    assert "NEURON_RT_NUM_CORES=8" in problem
    assert problem_with_ranks(64, "Trainium2", 16) is None
    assert problem_with_ranks(1, "Trainium2", 16) is None, "one process drives one core"


def test_fewer_cores_on_request():
    os.environ["NEURON_RT_NUM_CORES"] = "8"
    assert problem_with_ranks(8, None, 16) is None
    assert "got 64, allowed: 8, one for each logical core (NEURON_RT_NUM_CORES=8)" in (problem_with_ranks(64, None, 16) or "")
    os.environ["NEURON_RT_NUM_CORES"] = "0"  # the runtime's word for all
    assert problem_with_ranks(64, None, 16) is None


@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 32, 64])
def test_e7_ranks_that_a_trainium1_takes(ranks: int):
    assert problem_with_ranks(ranks, "Trainium1", 0) is None


@pytest.mark.parametrize("ranks", [3, 6, 12, 33])
def test_e7_others_are_refused_with_the_list(ranks: int):
    problem = problem_with_ranks(ranks, "Trainium1", 0)
    assert problem and f"got {ranks}, allowed on Trainium1: 1, 2, 8, 16 or a multiple of 32" in problem


def test_what_is_not_known_refuses_nothing():
    assert logical_cores(None, 0) == (None, "not known")
    assert problem_with_ranks(7, None, 0) is None
    os.environ["NEURON_RT_VISIBLE_CORES"] = "0-3"
    assert problem_with_ranks(7, None, 16) is None


def test_the_backend_counts_device_nodes(tmp_path: Path):
    backend = NeuronBackend()
    backend.device_nodes = tmp_path / "neuron*"
    assert backend.check_ranks(8) is None  # no device node: `require` says that the driver is missing
    for name in ("neuron0", "neuron1", "neuron10", "neuron_other"):
        (tmp_path / name).touch()
    with pytest.raises(BackendUnavailable, match=r"got 8, allowed: 12, .*3 chips, 24 physical cores, 12 logical cores"):
        backend.check_ranks(8)
    assert backend.check_ranks(12) is None
    with pytest.raises(BackendUnavailable, match="allowed on Trainium1"):
        backend.check_ranks(6, "Trainium1")
