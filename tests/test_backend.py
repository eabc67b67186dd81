"""What every backend promises. One test, run on each backend that is usable on this machine and on the scripted one."""

from __future__ import annotations

import inspect
import json
import os
import random

import pytest
import torch

from backends import NAMES, Backend, BackendUnavailable, get_backend
from backends.base import CompileCache, Memory
from backends.cuda import CudaBackend
from tests.fake_backend import FAKE_PEAK, FakeBackend, FakeClock


class Recorder:
    """Hands everything on to a backend and notes what was asked."""

    def __init__(self, backend: Backend):
        self.backend, self.seen = backend, set()

    def __getattr__(self, member):
        self.seen.add(member)
        return getattr(self.backend, member)


def public_members() -> set[str]:
    """Every public name of Backend, also those that are declared only."""
    names = {name for name, _ in inspect.getmembers(Backend)} | set(Backend.__annotations__)
    return {name for name in names if not name.startswith("_")}


def usable(name: str) -> Backend:
    if name == "fake":
        return FakeBackend(environment=(("FIRSTSTEP_FAKE", "1", "shows that a wanted variable is set"),))
    backend = get_backend(name)
    try:
        backend.require()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return backend


@pytest.mark.parametrize("name", [*NAMES, "fake"])
def test_contract(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backend = Recorder(usable(name))
    assert backend.name == name
    assert backend.require() is None
    assert backend.check_ranks(1) is None

    # Environment: what is wanted ends up set, each with a reason; a second look finds it set.
    wanted = backend.wanted_environment()
    assert all(reason for _, _, reason in wanted)
    monkeypatch.setattr(
        os, "environ", {k: v for k, v in os.environ.items() if k not in [variable for variable, _, _ in wanted]}
    )
    assert [(v.name, v.value, v.reason, v.set_by) for v in backend.set_environment()] == [(*want, "backend") for want in wanted]
    assert [(v.name, v.value, v.reason, v.set_by) for v in backend.set_environment()] == [(*want, "user") for want in wanted]

    # Compile cache: its variable moves it.
    variable = backend.compile_cache_variable
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "compiled"))
        assert backend.compile_cache().directory == str(tmp_path / "compiled")
    assert backend.compiles_eagerly == (name == "neuron")

    # Device: tensors live on it, and a seed repeats what is drawn on the host and on the device.
    device = backend.device()
    assert device == backend.device(0)
    assert torch.ones(2, device=device).device.type == device.type

    def draw():
        backend.seed(3)
        return random.random(), torch.rand(4).tolist(), torch.rand(4, device=device).tolist()

    assert draw() == draw()
    matrix = torch.randn(64, 64, device=device)
    assert backend.synchronize() is None

    # Memory: bytes or None; a new peak is not above the old one.
    memory = backend.memory()
    assert isinstance(memory, Memory)
    assert all(value is None or (isinstance(value, int) and value >= 0) for value in vars(memory).values())
    peak = memory.peak_allocated_bytes
    assert backend.reset_peak_memory() is None
    assert (backend.memory().peak_allocated_bytes is None) == (peak is None)

    # Precision: bfloat16 only where asked for.
    with backend.autocast(torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
    with backend.autocast(None):
        assert (matrix @ matrix).dtype == torch.float32
    assert backend.pin_memory == (name == "cuda")
    assert not backend.pin_memory or torch.ones(1).pin_memory().is_pinned()

    # Optimizer: each declared implementation runs, and "loop" is always among them.
    assert backend.adamw[-1] == "loop"
    for implementation in backend.adamw:
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], fused=implementation == "fused", foreach=implementation == "foreach").step()
        assert (weight < 1).all()

    # Compile: the backend is registered, illegal keywords are refused by name, further keywords are shared.
    assert backend.compile_backend in torch._dynamo.list_backends(exclude_tags=())
    backend.check_compile(**{option: values[0] for option, values in backend.compile_options.items()})
    with pytest.raises(ValueError, match=r"dynamic.*True.*False"):
        backend.check_compile(dynamic=True)
    with pytest.raises(ValueError, match=r"speed.*dynamic, fullgraph"):
        backend.check_compile(speed=11)
    assert all(value is backend.compile_kwargs()[key] for key, value in backend.compile_kwargs().items())
    cache = backend.compile_cache()
    assert backend.compile_cache_counters() == (cache.hits, cache.misses)
    assert isinstance(cache, CompileCache)
    assert all(value is None or value >= 0 for value in (cache.files, cache.size_bytes, cache.hits, cache.misses))
    fallbacks = backend.fallback_ops()
    assert fallbacks is None or all(isinstance(op, str) for op in fallbacks)
    assert backend.process_group in torch.distributed.Backend.backend_list

    # Peaks: of this device and with a source, or unknown; never that of a chip nobody knows.
    assert backend.chip() is None or backend.chip().strip()
    peaks = backend.peaks("float32")
    assert all(peak.flops > 1e6 and peak.dtype == "float32" and peak.source and peak.per != "chip" for peak in peaks)
    assert backend.peak_flops("float32") == (peaks[0] if peaks else None)
    assert backend.peaks("float32", "Abacus 9000") == []
    assert backend.peak_flops("float32", "Abacus 9000") is None

    # Profile: the files exist and hold the operators; a second profile overwrites nothing.
    assert "activities" in backend.profile_arguments(tmp_path)
    written = set()
    for _ in range(2):
        with backend.profiler(tmp_path / "profile") as files:
            matrix.mm(matrix)
            assert files == []
        assert files
        assert any("aten::mm" in file.read_text(errors="ignore") for file in files if file.suffix == ".json")
        assert written.isdisjoint(files)
        written |= set(files)

    # Graphs: named, or not known.
    graphs = backend.compiled_graphs()
    assert graphs is None or all(isinstance(graph, str) for graph in graphs)

    # A compile cache's key: versions and variables, in words.
    settings = backend.compile_settings()
    assert settings["version of torch"] == torch.__version__
    assert set(backend.compile_variables) <= set(settings)
    assert {f"version of {package}" for package in backend.compile_packages} <= set(settings)

    # Memory and bandwidth: of a listed chip, and nobody else's.
    listed = backend.limits("Trainium2")
    assert listed is not None and listed.memory_bytes * listed.ranks_per_chip == 96 * 2**30
    assert backend.limits("no such chip") is None

    # A doctor's checks of the machine.
    assert all(check.status in ("ok", "warning", "failure") for check in backend.machine_checks(1, None))

    # Record: facts that JSON can hold.
    facts = json.loads(json.dumps(backend.describe()))
    assert facts["chip"] == backend.chip()
    assert facts["torch"] == torch.__version__

    assert public_members() - backend.seen == set(), "members of Backend that this contract does not exercise"


def test_host_batches_are_pinned_for_cuda_only():
    assert [name for name in NAMES if get_backend(name).pin_memory] == ["cuda"]


def test_unknown_backend_names_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'tpu'.*cpu, cuda, neuron"):
        get_backend("tpu")


def test_one_backend_object_for_each_name():
    assert get_backend("cpu") is get_backend("cpu")


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setattr(os, "environ", {"FIRSTSTEP_A": "mine"})
    backend = FakeBackend(environment=(("FIRSTSTEP_A", "1", "a"), ("FIRSTSTEP_B", "2", "b")))
    assert [(v.name, v.value, v.set_by) for v in backend.set_environment()] == [
        ("FIRSTSTEP_A", "mine", "user"),
        ("FIRSTSTEP_B", "2", "backend"),
    ]


def test_what_the_launcher_set_is_not_taken_for_the_users(monkeypatch):
    """E10: every variable that was changed for the run is listed with who changed it."""
    found = {"FIRSTSTEP_A": "1", "OMP_NUM_THREADS": "1", "FIRSTSTEP_LAUNCHER_SET": "FIRSTSTEP_A OMP_NUM_THREADS GONE "}
    monkeypatch.setattr(os, "environ", found)
    backend = FakeBackend(environment=(("FIRSTSTEP_A", "0", "a"), ("FIRSTSTEP_B", "2", "b")))
    assert [(v.name, v.value, v.set_by) for v in backend.set_environment()] == [
        ("FIRSTSTEP_A", "1", "launcher"),
        ("FIRSTSTEP_B", "2", "backend"),
        ("OMP_NUM_THREADS", "1", "launcher"),
    ]


def test_cache_counts_files_by_suffix(tmp_path):
    (tmp_path / "ab" / "cd").mkdir(parents=True)
    (tmp_path / "ab" / "cd" / "1.neff").write_bytes(b"12345")
    (tmp_path / "ab" / "2.neff").write_bytes(b"123")
    (tmp_path / "ab" / "2.lock").write_bytes(b"1")
    cache = CompileCache.at(tmp_path, ".neff", hits=1)
    assert (cache.files, cache.size_bytes, cache.hits, cache.misses) == (2, 8, 1, None)
    missing = CompileCache.at(tmp_path / "none")
    assert (missing.files, missing.size_bytes) == (0, 0)
    assert not (tmp_path / "none").exists()


def test_cache_that_cannot_be_read_is_unknown(tmp_path, monkeypatch):
    def refuse(directory, onerror):
        onerror(PermissionError(13, "denied"))
        return iter(())

    monkeypatch.setattr("backends.base.os.walk", refuse)
    cache = CompileCache.at(tmp_path)
    assert (cache.files, cache.size_bytes) == (None, None)


def test_a_failing_body_is_not_hidden_by_the_profiler(tmp_path):
    with pytest.raises(ZeroDivisionError), FakeBackend().profiler(tmp_path):
        raise ZeroDivisionError


def test_fake_backend_is_scripted():
    clock = FakeClock()

    def broken() -> Memory:
        raise NotImplementedError("memory_stats")

    backend = FakeBackend(
        clock=clock,
        on_synchronize=lambda: clock.advance(2.5),
        memory_query=broken,
        caches=[CompileCache(misses=0), CompileCache(misses=3)],
        fallbacks=[{}, {"aten::sort": None}],
        unavailable="no fake here",
    )
    backend.synchronize()
    backend.synchronize()
    assert backend.called("synchronize") == [0.0, 2.5]
    assert clock() == 5.0
    assert backend.memory() == Memory()
    assert [backend.compile_cache().misses for _ in range(3)] == [0, 3, 3]
    assert [backend.fallback_ops() for _ in range(3)] == [{}, {"aten::sort": None}, {"aten::sort": None}]
    assert backend.peak_flops("float32") is FAKE_PEAK
    assert backend.peak_flops("bfloat16") is None
    with pytest.raises(BackendUnavailable, match="no fake here"):
        backend.require()


# --- CUDA without a GPU: what can be decided before one is touched -----------------------------------------------------


def refuse(reason: str):
    def init():
        raise RuntimeError(reason)

    return init


@pytest.mark.parametrize(
    ("build", "driver", "reason", "message"),
    [
        (None, True, "", r"torch .* is not a CUDA build; install one"),
        ("13.0", False, "Found no NVIDIA driver", r"no NVIDIA driver is loaded \(Found no NVIDIA driver\)"),
        (
            "13.0",
            True,
            "No CUDA GPUs are available",
            r"gives no GPU \(No CUDA GPUs are available\); see .*CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_cuda_says_which_piece_is_missing(monkeypatch, tmp_path, build, driver, reason, message):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", refuse(reason))
    backend = CudaBackend()
    backend.driver_version_file = tmp_path if driver else tmp_path / "missing"
    with pytest.raises(BackendUnavailable, match=rf"device 'cuda' .*{message}.*--run\.device cpu$"):
        backend.require()


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_e5_cuda_rank_takes_its_gpu_or_the_only_one_it_is_shown(monkeypatch, visible, local_rank, index):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert CudaBackend().device(local_rank) == torch.device("cuda", index)
    assert current == [index]


def test_cuda_rank_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match=r"local rank 2 has no GPU of its own: 2 visible"):
        CudaBackend().device(2)


def test_cuda_peak_follows_the_exact_name_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert (CudaBackend().chip(), CudaBackend().peak_flops("bfloat16").flops) == ("H200", 989e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 NVL")
    assert (CudaBackend().chip(), CudaBackend().peak_flops("bfloat16")) == ("NVIDIA H200 NVL", None)


def test_cuda_with_tf32_has_no_float32_peak():
    assert CudaBackend().peak_flops("float32", "H200").flops == 67e12
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert CudaBackend().peaks("float32", "H200") == []
        assert CudaBackend().peak_flops("bfloat16", "H200").flops == 989e12
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)\n", "570.124.06"),
        ("something else", None),
    ],
)
def test_cuda_driver_version(tmp_path, text, version):
    backend = CudaBackend()
    backend.driver_version_file = tmp_path / "version"
    assert backend._driver_version() is None
    backend.driver_version_file.write_text(text)
    assert backend._driver_version() == version
