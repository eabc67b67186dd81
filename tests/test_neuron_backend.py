"""The neuron backend on a machine without one: what it says, and what it does with a stand-in for torch_neuronx.

The stand-in follows AWS's documentation. Nothing here shows that anything runs on a Trainium chip.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from backends import BackendUnavailable, get_backend
from backends.base import Memory
from backends.neuron import NeuronBackend

VERSIONS = {"torch-neuronx": "2.13.3.0", "torch": "2.13.0+cpu", "neuronx-cc": "2.28.7631.0"}


class Block(torch.nn.Module):
    """The smallest module that Dynamo compiles: it leaves torch's own module classes alone."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.fixture
def neuron(monkeypatch, tmp_path):
    """A backend that finds nothing of Neuron, whatever this machine has, and an environment of its own."""
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "TORCH_NEURONX_"))}
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_neuronx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)  # import fails
    monkeypatch.setattr("backends.neuron.importlib.util.find_spec", lambda name: sys.modules.get(name))
    monkeypatch.delattr(torch, "neuron", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: _installed({}, name))
    backend = NeuronBackend()
    backend.device_nodes = tmp_path / "neuron*"
    backend.driver_version_file = tmp_path / "version"
    return backend


@pytest.fixture
def installed(neuron, monkeypatch, tmp_path):
    """The same with everything that `require` asks for; returns the backend, with the stand-ins as attributes."""

    def module(name: str, **members) -> ModuleType:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, loader=None)
        made.__path__ = []
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    neuron.oldest_python = (3, 11)
    (tmp_path / "neuron0").touch()
    (tmp_path / "version").write_text("2.31.7.0\n")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: _installed(VERSIONS, name))
    neuron.package = module("torch_neuronx")
    neuron.utils = module("torch_neuronx.utils", get_platform_target=lambda: "trn2")
    neuron.metrics = module("torch_neuronx.metrics")
    neuron.calls = []
    neuron.torch_neuron = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 4, synchronize=lambda: neuron.calls.append("synchronize")
    )
    monkeypatch.setattr(torch, "neuron", neuron.torch_neuron, raising=False)
    return neuron


def _installed(versions: dict[str, str], name: str) -> str:
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]


# --- require -------------------------------------------------------------------------------------------------------


def test_require_names_all_that_is_missing_at_once(neuron):
    neuron.oldest_python = (3, 99)
    with pytest.raises(BackendUnavailable) as error:
        neuron.require()
    message = str(error.value)
    assert "Python 3.99 or later" in message
    assert "torch_neuronx (not installed)" in message
    assert f"no {neuron.device_nodes}" in message
    assert 'pip install torch==2.14.0 "torch-neuronx==2.14.*"' in message
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in message
    assert message.endswith("--run.device cpu")
    assert "\n" not in message


def test_require_asks_for_python_312():
    assert NeuronBackend().oldest_python == (3, 12)


def test_require_passes_when_all_is_there(installed):
    installed.require()


def test_require_names_only_what_is_missing(installed):
    installed.device_nodes = Path("/nowhere/neuron*")
    with pytest.raises(BackendUnavailable, match=r"missing: the Neuron driver \(no /nowhere/neuron\*") as error:
        installed.require()
    assert "Python" not in str(error.value)
    assert "not installed" not in str(error.value)


def test_require_does_not_ask_for_the_device_before_the_rest_is_there(installed):
    installed.torch_neuron.is_available = lambda: pytest.fail("asked too early")
    installed.device_nodes = Path("/nowhere/neuron*")
    with pytest.raises(BackendUnavailable):
        installed.require()


def test_require_without_a_free_core(installed):
    installed.torch_neuron.is_available = lambda: False
    with pytest.raises(BackendUnavailable, match=r"torch\.neuron\.is_available\(\) is False"):
        installed.require()


def test_require_when_another_plug_in_took_the_place(installed, monkeypatch):
    monkeypatch.delattr(torch, "neuron")
    with pytest.raises(BackendUnavailable, match="another device plug-in"):
        installed.require()


def test_require_when_the_package_does_not_load(installed, monkeypatch):
    monkeypatch.setattr("backends.neuron.importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    with pytest.raises(BackendUnavailable, match="a torch_neuronx that loads"):
        installed.require()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch-neuronx": "2.9.0.2.15.32035", "torch": "2.9.0"}, "found 2.9.0.2.15.32035, which is built on XLA"),
        (
            {"torch-neuronx": "2.14.3.0", "torch": "2.13.0+cpu"},
            r"torch 2\.14, .* 2\.14\.3\.0 pairs with \(found torch 2\.13\.0",
        ),
    ],
)
def test_require_refuses_releases_that_do_not_fit(installed, monkeypatch, versions, message):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: _installed(versions, name))
    with pytest.raises(BackendUnavailable, match=message):
        installed.require()


# --- environment ---------------------------------------------------------------------------------------------------


def test_the_users_environment_wins(neuron):
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = "/mine"
    os.environ["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] = "0"
    in_force = {variable.name: (variable.value, variable.set_by) for variable in neuron.set_environment()}
    assert in_force == {
        "TORCH_NEURONX_NEFF_CACHE_DIR": ("/mine", "user"),
        "TORCH_NEURONX_METRICS_ENABLED": ("1", "backend"),
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": ("0", "user"),
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": ("1", "backend"),
    }
    assert {name: os.environ[name] for name in in_force} == {name: value for name, (value, _) in in_force.items()}
    assert neuron.compile_cache().directory == "/mine"
    assert neuron.compile_kwargs()["options"]["fallback_execution"] is True


def test_cache_directory_is_the_same_in_each_run(neuron):
    neuron.set_environment()
    assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] == NeuronBackend().compile_cache().directory == "/tmp/neff_cache"


# --- memory --------------------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_asked_is_unknown(installed):
    def broken():
        raise RuntimeError("memory statistics are not implemented")

    installed.torch_neuron.memory_allocated = broken
    installed.torch_neuron.memory_reserved = lambda: 0
    installed.torch_neuron.reset_peak_memory_stats = broken
    assert installed.memory() == Memory(None, None, 0, None)
    assert installed.reset_peak_memory() is None


def test_memory_waits_for_the_device_first(installed):
    def allocated():
        installed.calls.append("memory_allocated")
        return 7

    installed.torch_neuron.memory_allocated = allocated
    installed.torch_neuron.max_memory_allocated = lambda: 9
    installed.torch_neuron.current_device = lambda: 3
    installed.torch_neuron.get_device_properties = lambda index: SimpleNamespace(
        total_memory=24 * 2**30 if index == 3 else None
    )
    assert installed.memory() == Memory(7, 9, None, 24 * 2**30)
    assert installed.calls == ["synchronize", "memory_allocated"]


def test_a_device_that_fails_is_not_hidden(installed):
    def failed():
        raise RuntimeError("execution failed")

    installed.torch_neuron.synchronize = failed
    with pytest.raises(RuntimeError, match="execution failed"):
        installed.memory()


def test_host_batches_are_not_pinned(neuron):
    assert neuron.pin_memory is False


# --- compiling -----------------------------------------------------------------------------------------------------


def test_all_blocks_hand_the_same_options_object_to_the_compiler(neuron):
    """The compiler writes into its options, as torch_neuronx's does: with a fresh dict each block would be a new graph."""
    received = []

    def compiler(graph, inputs, options):
        options["dynamic"] = False
        received.append(options)
        return graph.forward

    torch._dynamo.reset()
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.compile(backend=compiler, dynamic=False, fullgraph=True, **neuron.compile_kwargs())
        block(torch.ones(2, 4))
    assert len(received) == 1, "three identical blocks are one graph"
    assert received[0] is neuron.compile_kwargs()["options"]
    assert received[0] == {"fallback_execution": False, "dynamic": False}
    assert neuron.compile_kwargs()["options"] is not NeuronBackend().compile_kwargs()["options"]


@pytest.mark.parametrize("value", [True, None, 0])
def test_dynamic_shapes_are_refused(neuron, value):
    with pytest.raises(ValueError, match=rf"dynamic: got {value} on neuron, allowed: False"):
        neuron.check_compile(dynamic=value, fullgraph=True)


def test_cache_counts_neff_files_only(neuron, tmp_path):
    os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"] = str(tmp_path)
    (tmp_path / "ab" / "cd").mkdir(parents=True)
    (tmp_path / "ab" / "cd" / ("0" * 32 + ".neff")).write_bytes(b"1234")
    (tmp_path / "ab" / "cd" / "lock").write_bytes(b"1")
    cache = neuron.compile_cache()
    assert (cache.files, cache.size_bytes, cache.hits, cache.misses) == (1, 4, None, None)


HITS, MISSES = "CompilationCache.PersistentHits", "CompilationCache.PersistentMisses"


@pytest.mark.parametrize(
    ("enabled", "counters", "expected"),
    [
        (True, {HITS: 5, MISSES: 2}, (5, 2)),
        (True, {HITS: 5}, (5, 0)),  # a counter comes into being when it first counts
        (True, {}, (0, 0)),
        (True, {"Renamed.Hits": 5}, (None, None)),
        (False, {HITS: 0, MISSES: 0}, (None, None)),  # counting is off: 0 would be a lie
    ],
)
def test_cache_counters(installed, enabled, counters, expected):
    installed.metrics.is_enabled = lambda: enabled
    installed.metrics.get_counter_names = lambda: list(counters)
    installed.metrics.get_counter_value = counters.get
    cache = installed.compile_cache()
    assert (cache.hits, cache.misses) == expected


def test_cache_counters_of_a_release_without_them(installed):
    assert installed.compile_cache().hits is None


def test_fallback_operators(installed):
    assert installed.fallback_ops() is None, "a release without the function cannot tell"
    installed.package.get_fallback_ops = lambda: ["aten::qr", "aten::eigh", "aten::qr"]
    assert installed.fallback_ops() == {"aten::eigh": None, "aten::qr": None}
    installed.package.get_fallback_ops = lambda: []
    assert installed.fallback_ops() == {}, "none fell back is not the same as unknown"


# --- chip and peaks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "chip", "flops"), [("trn2", "Trainium2", 158e12), ("trn3", "Trainium3", 158e12), ("trn9", "trn9", None)]
)
def test_chip(installed, target, chip, flops):
    installed.utils.get_platform_target = lambda: target
    assert installed.chip() == chip
    peak = installed.peak_flops("bfloat16")
    assert (peak and peak.flops) == flops


def test_chip_that_does_not_say_its_name(neuron):
    assert neuron.chip() is None
    assert neuron.peaks("bfloat16") == []


@pytest.mark.parametrize(
    ("environment", "lnc", "source"),
    [
        ({}, 2, "AWS's documented default"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 1, "NEURON_LOGICAL_NC_CONFIG"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, 1, "NEURON_RT_VIRTUAL_CORE_SIZE"),
        ({"NEURON_LOGICAL_NC_CONFIG": "4"}, None, "NEURON_LOGICAL_NC_CONFIG=4 is neither 1 nor 2"),
    ],
)
def test_logical_core_config(installed, environment, lnc, source):
    os.environ.update(environment)
    facts = installed.describe()
    assert (facts["logical_core_config"], facts["logical_core_config_source"]) == (lnc, source)
    assert bool(installed.peaks("bfloat16")) == (lnc is not None)
    assert facts["environment"] == environment


def test_describe(installed):
    facts = installed.describe()
    assert facts["torch_neuronx"] == "2.13.3.0"
    assert facts["neuronx_cc"] == "2.28.7631.0"
    assert facts["driver"] == "2.31.7.0"
    assert facts["devices"] == 4
    installed.driver_version_file.unlink()
    del installed.torch_neuron.device_count
    assert (installed.describe()["driver"], installed.describe()["devices"]) == (None, None)


# --- profile -------------------------------------------------------------------------------------------------------


def test_profile_uses_the_neuron_capture_where_there_is_one(installed, tmp_path, monkeypatch):
    from torch.profiler import ProfilerActivity

    assert installed.profile_arguments(tmp_path)["activities"] == [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
    assert "experimental_config" not in installed.profile_arguments(tmp_path)

    profiling = ModuleType("torch_neuronx.profiling")
    profiling.NeuronConfig = lambda profile_output_dir: {"profile_output_dir": profile_output_dir}
    profiling.NeuronProfiler = lambda config: SimpleNamespace(export_trace=("exporter of", config))
    monkeypatch.setitem(sys.modules, "torch_neuronx.profiling", profiling)
    arguments = installed.profile_arguments(tmp_path)
    assert arguments["experimental_config"] == {"profile_output_dir": str(tmp_path)}
    assert arguments["on_trace_ready"] == ("exporter of", {"profile_output_dir": str(tmp_path)})


def test_e5_device_has_no_index():
    """In a process of its own: the name of the plug-in device can be set only once."""
    program = """
import torch
from backends import get_backend
torch.utils.rename_privateuse1_backend("neuron")
print(get_backend("neuron").device(3), get_backend("neuron").device(3).index)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["neuron", "None"], done.stderr


def test_get_backend_keeps_one_options_object():
    assert get_backend("neuron").compile_kwargs()["options"] is get_backend("neuron").compile_kwargs()["options"]


def test_a_rank_has_a_quarter_of_a_chip_with_two_cores_and_an_eighth_with_one(monkeypatch):
    """Case E8: and the size of a logical core is part of what a compile cache is keyed by."""
    backend = NeuronBackend()
    for lnc, ranks in (("2", 4), ("1", 8)):
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
        limits = backend.limits("Trainium2")
        assert limits is not None
        assert (limits.ranks_per_chip, limits.memory_bytes) == (ranks, 96 * 2**30 / ranks)
        assert backend.compile_settings()["LNC"] == lnc
    assert backend.limits("H200") is None  # not a chip that has logical cores
