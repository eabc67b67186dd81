"""What becomes of a run of several ranks, through train.py, when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, Processes
from tests.test_train import TINY

pytestmark = pytest.mark.distributed

RUN = [*TINY, "--training.steps", "12"]


def record_of(folder: Path) -> dict[str, Any]:
    (found,) = folder.glob("*/record.json")
    return json.loads(found.read_text())


@pytest.mark.parametrize("world_size,victim", [(4, 2), (2, 0)])
def test_a_killed_rank_ends_the_others_within_15_seconds_by_name(world_size: int, victim: int, tmp_path: Path):
    command = ["-m", "tests.faulty_train", "kill", str(victim), "3", *RUN, "--run.output_dir", str(tmp_path)]
    with Processes(command, world_size) as started:
        dead = started.processes[victim]
        assert dead.wait(120)[0] == -signal.SIGKILL
        killed = time.monotonic()
        finished = started.finish(15)
        assert time.monotonic() - killed < 15
    for rank, (code, output) in enumerate(finished):
        if rank != victim:
            assert code == 1 and f"rank {victim} (pid {dead.pid} on" in output.splitlines()[-1], output
    record = record_of(tmp_path)
    if victim == 0:  # it writes the record
        assert record["status"] == "running"
    else:
        assert record["status"] == "failed" and f"rank {victim} (pid {dead.pid}" in record["cause"], record["cause"]
        assert len((next(tmp_path.glob("*/steps.jsonl"))).read_text().splitlines()) >= 1


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_e17_the_first_failing_rank_is_the_cause(mode: str, tmp_path: Path):
    arguments = [*RUN, "--run.output_dir", str(tmp_path), "--run.mode", mode]
    arguments += ["--compile.backend", "aot_eager"] if mode == "compile" else []
    with Processes(["-m", "tests.faulty_train", "raise", "1", "7", *arguments], 2) as started:
        (code, output), (own_code, own_output) = started.finish(120)
    assert (code, own_code) == (1, 1), output
    cause = "rank 1 failed in step 7"
    assert cause in output and "ValueError: a fault was planted" in output, output
    assert "ValueError: a fault was planted" in own_output
    record = record_of(tmp_path)
    assert record["status"] == "failed" and cause in record["cause"] and "timed out" not in record["cause"].lower()


def test_torchrun_starts_all_ranks_again(tmp_path: Path):
    """Elastic restart: the run that failed and the one that took its place each leave a record."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*torchrun, "-m", "tests.faulty_train", "kill", "1", "3", *RUN, "--run.output_dir", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=180)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-3000:]
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/record.json")]
    assert sorted(record["status"] for record in records) == ["failed", "finished"], output[-3000:]
    failed = next(record for record in records if record["status"] == "failed")
    assert "rank 1" in failed["cause"], failed["cause"]
