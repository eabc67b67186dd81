"""The CPU backend: what it measures, where it keeps it, and what TorchInductor's cache says."""

from __future__ import annotations

import json
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from backends import cpu_peak, inductor
from backends.cpu import CpuBackend

CPUINFO = """\
processor\t: 0
model name\t: Imaginary CPU 3
physical id\t: 0
core id\t\t: 0

processor\t: 1
model name\t: Imaginary CPU 3
physical id\t: 0
core id\t\t: 0
"""


class Block(torch.nn.Module):
    """One matrix product: Inductor calls the library for it, so that no C++ has to be compiled."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    backend = CpuBackend()
    backend.cpuinfo = tmp_path / "cpuinfo"
    return backend


@pytest.fixture
def measurements(monkeypatch):
    """Replace the timing; the list gets one entry for each measurement that would have been made."""
    made: list[torch.dtype] = []

    def measure(dtype):
        made.append(dtype)
        return 3e11, 1024

    monkeypatch.setattr(cpu_peak, "measure", measure)
    return made


def test_measured_peak_says_how_it_was_measured(cpu, measurements):
    peak = cpu.peak_flops("bfloat16")
    assert (peak.chip, peak.dtype, peak.flops, peak.per, peak.measured) == ("Imaginary CPU 3", "bfloat16", 3e11, "device", True)
    assert re.fullmatch(rf"measured: 1024x1024 matmul, {torch.get_num_threads()} threads, \d{{4}}-\d\d-\d\d", peak.source)


def test_peak_is_measured_once_for_each_type_and_number_of_threads(cpu, measurements, monkeypatch):
    assert cpu.peaks("float32") == CpuBackend.peaks(cpu, "float32")
    assert measurements == [torch.float32]
    cpu.peaks("bfloat16")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    cpu.peaks("float32")
    assert measurements == [torch.float32, torch.bfloat16, torch.float32]
    assert len(json.loads(cpu_peak.cache_file().read_text())) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"%s": 3}', '{"%s": {"flops": "fast", "size": 1, "date": ""}}'])
def test_damaged_cache_file_is_rewritten(cpu, measurements, damage):
    peak = cpu.peak_flops("float32")
    (key,) = json.loads(cpu_peak.cache_file().read_text())
    cpu_peak.cache_file().write_text(damage.replace("%s", key))
    assert cpu.peak_flops("float32") == peak
    assert len(measurements) == 2
    assert cpu.peak_flops("float32") == peak
    assert len(measurements) == 2, "the rewritten file is read again"
    assert [path.name for path in cpu_peak.cache_file().parent.iterdir()] == ["cpu_peak.json"], "no temporary file is left"


def test_unwritable_cache_folder_costs_only_time(cpu, measurements, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder below a file: also root cannot make it
    assert cpu.peak_flops("float32").flops == 3e11
    assert cpu.peak_flops("float32").flops == 3e11
    assert len(measurements) == 2


def test_peak_of_an_unnamed_processor_is_not_kept(cpu, measurements, tmp_path):
    cpu.cpuinfo = tmp_path / "missing"
    assert cpu.chip() is None
    assert cpu.peak_flops("float32").chip == "unknown CPU"
    cpu.peaks("float32")
    assert len(measurements) == 2
    assert not cpu_peak.cache_file().exists()


@pytest.mark.parametrize("chip", ["H100 SXM", "Trainium2", "Imaginary CPU 4"])
def test_peak_of_another_chip_is_unknown(cpu, measurements, chip):
    assert cpu.peaks("float32", chip) == []
    assert cpu.peaks("float32", "Imaginary CPU 3") == cpu.peaks("float32")
    assert cpu.peaks("float16") == []


def test_measuring_is_short_and_draws_no_random_number():
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    flops, size = cpu_peak.measure(torch.float32)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert size in cpu_peak.SIZES
    assert flops > 1e8


def test_measuring_leaves_out_sizes_that_would_take_too_long(monkeypatch):
    monkeypatch.setattr(cpu_peak, "BUDGET_SECONDS", 0.0)
    assert cpu_peak.measure(torch.float32)[1] == cpu_peak.SIZES[0]


def test_memory_and_facts_come_from_the_host(cpu):
    memory = cpu.memory()
    assert memory.allocated_bytes is None
    assert memory.reserved_bytes is None
    assert 50e6 < memory.peak_allocated_bytes < memory.total_bytes  # bytes, not KiB: torch alone needs more than 50 MB
    facts = cpu.describe()
    assert facts["chip"] == "Imaginary CPU 3"
    assert facts["physical_cores"] == 1
    assert facts["threads"] == torch.get_num_threads()
    assert facts["host_memory_bytes"] == memory.total_bytes


def test_cores_are_unknown_without_cpuinfo(cpu, tmp_path):
    cpu.cpuinfo = tmp_path / "missing"
    assert cpu.describe()["physical_cores"] is None


def test_inductor_directory_is_the_one_torch_uses(monkeypatch, tmp_path):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(inductor.cache_directory()) == default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert inductor.compile_cache().directory == str(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_run_that_compiled_nothing_has_no_hit_and_no_miss(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert inductor.hits_and_misses() == (0, 0)


@pytest.mark.parametrize(
    ("fx", "autograd", "expected"),
    [
        ((0, 3, 0), (0, 2), (0, 3)),  # cold
        ((3, 0, 0), (2, 0), (3, 0)),  # warm: both caches are consulted
        ((3, 0, 0), (0, 2), (3, 0)),  # traced again, but every graph's code was fetched
        ((2, 0, 1), (0, 0), (2, 1)),  # a graph that cannot be cached was compiled
        ((0, 0, 0), (0, 1), (0, 1)),  # bundled, cold: only AOTAutograd's cache is consulted
        ((0, 0, 0), (1, 0), (1, 0)),  # bundled, warm
    ],
)
def test_hits_and_misses(monkeypatch, fx, autograd, expected):
    counters = {
        "inductor": dict(zip(("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"), fx, strict=True)),
        "aot_autograd": dict(zip(("autograd_cache_hit", "autograd_cache_miss"), autograd, strict=True)),
    }
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert inductor.hits_and_misses() == expected


def test_cold_then_warm_with_real_inductor(cpu, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))

    def train_once():
        torch._dynamo.reset()  # forget what this process compiled; what is on disk stays
        before = cpu.compile_cache()
        block = Block()
        block.compile(backend=cpu.compile_backend, dynamic=False, fullgraph=True)
        block(torch.ones(2, 4)).sum().backward()
        after = cpu.compile_cache()
        return after.hits - before.hits, after.misses - before.misses, after.files - before.files

    hits, misses, files = train_once()
    assert hits == 0
    assert misses == 2  # forward and backward
    assert files > 0
    assert train_once() == (2, 0, 0)
