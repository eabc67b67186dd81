"""Saving and resuming with several ranks: every layout goes on exactly, and another layout goes on from the same state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simulated_neuron
from tests.durable import Ended, ended, run
from tests.ranks import ROOT, Processes, free_port
from tests.test_train import TINY
from training.checkpoint_store import CheckpointStore

pytestmark = pytest.mark.distributed

COMMON = ["--training.steps", "6", "--training.global_batch_size", "4", "--training.local_batch_size", "1"]
COMMON += ["--checkpoint.every_steps", "3", "--checkpoint.keep_last", "5", "--checkpoint.export"]
LAYOUTS = {
    "FSDP": (2, []),
    "DDP": (2, ["--parallel.data_parallel_wrapper", "ddp"]),
    "simple_fsdp": (2, ["--parallel.data_parallel_wrapper", "simple_fsdp"]),
    "TP": (2, ["--parallel.tensor_parallel_degree", "2"]),
    "FSDP x TP": (4, ["--parallel.tensor_parallel_degree", "2"]),
    "HSDP": (4, ["--parallel.data_parallel_replicate_degree", "2", "--checkpoint.no_asynchronous"]),
}
MODULES = {"cpu": "train", "neuron": "tests.simulated_neuron.train"}


def train_ranks(device: str, world_size: int, folder: Path, runs: list[list[str]]) -> list[Ended]:
    """Train one run after the other on the same processes; each goes into the folder of its number."""
    plan = [
        {
            "arguments": [*TINY, *COMMON, "--run.device", device, "--run.output_dir", str(folder / str(number)), *flags],
            "port": free_port(),
        }
        for number, flags in enumerate(runs)
    ]
    environment = simulated_neuron.environment(folder) if device == "neuron" else None
    command = ["-m", "tests.rank_worker", MODULES[device], json.dumps(plan)]
    with Processes(command, world_size, environment) as ranks:
        finished = ranks.finish(240)
    result = []
    for number in range(len(runs)):
        folders = list((folder / str(number)).glob("*/record.json"))
        assert folders, "\n".join(output[-2000:] for _, output in finished)
        codes = [next(line for line in output.splitlines() if line.startswith(f"RUN {number} ")) for _, output in finished]
        assert codes == [f"RUN {number} 0"] * world_size, "\n".join(output[-2000:] for _, output in finished)
        result.append(ended(0, folders[0].parent))
    return result


def weights(done: Ended) -> bytes:
    """The tensors of the exported file, without its header, which names the run."""
    data = (done.folder / "checkpoints" / "hf" / "model.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize("device", MODULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_exactly(layout: str, device: str, tmp_path: Path):
    world_size, flags = LAYOUTS[layout]
    # The second run begins where the first will have saved.
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    straight, resumed = train_ranks(
        device,
        world_size,
        tmp_path,
        [
            [*flags, "--checkpoint.folder", store.url],
            [*flags, "--resume", store.folder(3), "--checkpoint.folder", str(tmp_path / "others")],
        ],
    )
    assert straight.manifest(3).world_size == world_size
    assert resumed.steps == straight.steps[3:] and len(resumed.steps) == 3
    assert weights(resumed) == weights(straight)
    files = {name: file["sha256"] for name, file in straight.manifest(6).files.items() if name.endswith(".distcp")}
    assert len(files) == world_size
    assert files == {name: file["sha256"] for name, file in resumed.manifest(6).files.items() if name.endswith(".distcp")}


def test_another_layout_goes_on_from_the_same_state(tmp_path: Path, capsys):
    """Four ranks to two to one and back, in the middle of a run, and with nothing left to do: no weight changes on the way."""
    common = ["--parallel.tensor_parallel_degree", "2"]
    (four,) = train_ranks("cpu", 4, tmp_path / "four", [common])
    two, closed = train_ranks(
        "cpu",
        2,
        tmp_path / "two",
        [["--resume", four.at(3)], ["--resume", four.at(6), "--checkpoint.folder", str(tmp_path / "x")]],
    )
    assert closed.steps == [] and weights(closed) == weights(four), "resharded exactly"
    assert two.record["checkpoints"]["resumed_from"]["world_size"] == 4
    for ours, theirs in zip(two.steps, four.steps[3:], strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["lr"] == theirs["lr"] and ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    one = run(tmp_path / "one", *COMMON, "--resume", two.at(6), "--checkpoint.folder", str(tmp_path / "y"), steps=6)
    assert one.steps == [] and weights(one) == weights(two)
    assert "resharded from 2 ranks to 1: parameters and optimizer state exactly" in capsys.readouterr().out
    half = run(tmp_path / "half", *COMMON, "--resume", four.at(3), "--checkpoint.folder", str(tmp_path / "z"), steps=6)
    (back,) = train_ranks("cpu", 2, tmp_path / "back", [["--resume", half.at(6), "--checkpoint.folder", str(tmp_path / "w")]])
    assert weights(back) == weights(half)


def test_a_damaged_file_of_another_rank_is_skipped_on_all(tmp_path: Path):
    (first,) = train_ranks("cpu", 2, tmp_path / "first", [[]])
    damaged = Path(first.at(6), "__1_0.distcp")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    plan = [{"arguments": [*TINY, *COMMON, "--run.output_dir", str(tmp_path / "first" / "0"), "--resume"], "port": free_port()}]
    with Processes(["-m", "tests.rank_worker", "train", json.dumps(plan)], 2) as ranks:
        finished = ranks.finish(120)
    assert f"checkpoint skipped: {damaged}: damaged" in finished[0][1], finished[0][1]
    (second,) = {path.parent for path in (tmp_path / "first" / "0").glob("*/record.json")} - {first.folder}
    assert ended(0, second).steps == first.steps[3:]


def test_all_ranks_stop_after_the_same_step_when_one_is_asked_to(tmp_path: Path):
    """And what they saved goes on."""
    arguments = [*TINY, "--training.global_batch_size", "4", "--training.steps", "100000", "--run.output_dir", str(tmp_path)]
    program = "import sys, train; sys.exit(train.main())"
    with Processes(["-c", program, *arguments, "--run.log_every", "1"], 2) as ranks:
        ranks.processes[0].wait_for(" 4/100000")
        ranks.processes[1].send(signal.SIGTERM)
        finished = ranks.finish(60)
    assert [code for code, _ in finished] == [143, 143], finished
    (record,) = tmp_path.glob("*/record.json")
    stopped = ended(143, record.parent)
    last = stopped.steps[-1]["step"]
    assert stopped.record["status"] == "interrupted" and f"SIGTERM: stopped after step {last}" in stopped.record["cause"]
    assert stopped.store.complete_steps() == [last]


def test_torchrun_goes_on_from_the_last_checkpoint(tmp_path: Path):
    """A rank is killed in step 8, with checkpoints every three steps: the launcher's next attempt begins with step 7."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    arguments = [*TINY, "--training.steps", "12", "--checkpoint.every_steps", "3", "--run.output_dir", str(tmp_path)]
    arguments += ["--checkpoint.no_asynchronous"]
    process = subprocess.run(
        [*torchrun, "-m", "tests.faulty_train", "kill", "1", "8", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    first, second = (ended(0, path.parent) for path in sorted(tmp_path.glob("*/record.json")))
    assert first.record["status"] == "failed" and "rank 1" in first.record["cause"]
    assert second.record["status"] == "finished" and [step["step"] for step in second.steps] == [*range(7, 13)]
    resumed = second.record["checkpoints"]["resumed_from"]
    assert resumed["run"] == first.record["id"] and resumed["why"] == "restart 1 of the launcher"
    assert second.store.url == first.store.url and second.store.complete_steps() == [12, 9]


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_validation_before_a_save_changes_nothing_of_it(mode: str, tmp_path: Path):
    """A forward pass alone leaves FSDP2's last units gathered, in the type of the products: neither may get into a file."""
    common = ["--training.dtype", "bfloat16", "--run.mode", mode]
    common += ["--compile.backend", "aot_eager"] if mode == "compile" else []
    validated = [*common, "--validation.every_steps", "3", "--validation.num_batches", "1"]
    without, with_it = train_ranks("cpu", 2, tmp_path, [common, validated])
    assert len(with_it.record["quality"]["validation"]) == 2
    assert with_it.steps == without.steps and weights(with_it) == weights(without)
    for step in (3, 6):
        ours, theirs = with_it.manifest(step).files, without.manifest(step).files
        assert [ours[name] for name in sorted(ours) if name != ".metadata"] == [
            theirs[name] for name in sorted(theirs) if name != ".metadata"
        ]
