"""Several processes, for tests: starts the ranks, ends them, and reads what they left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Trained:
    """What one run left behind."""

    codes: list[int]
    """Exit code of train.main on each rank."""
    record: dict[str, Any]
    steps: list[dict[str, Any]]
    outputs: list[str]
    """What each rank has printed, in this run and in those before and after it on the same processes."""

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step["grad_norm"] for step in self.steps]


class Processes:
    """Processes with the variables that torchrun would give them. As a context manager it ends them."""

    def __init__(
        self, command: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None, *, root: Path = ROOT
    ):
        base = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            base.pop(name, None)
        if world_size > 1:
            base |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
            base.setdefault("MASTER_PORT", str(free_port()))
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=root,
                env=base if world_size == 1 else base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that children of a rank, for example compilers, end with it
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def finish(self, timeout: float) -> list[tuple[int, str]]:
        """Wait for all, and return the exit code and the output of each.

        Args:
            timeout: seconds for all of them together.
        """
        ends = time.monotonic() + timeout
        outputs = [process.communicate(timeout=max(0.1, ends - time.monotonic()))[0] for process in self.processes]
        return [(process.returncode, output) for process, output in zip(self.processes, outputs, strict=True)]


def _own_ports() -> Iterator[int]:
    """Go round the ports of this test process, which lie below those that the system gives to whoever asks for any.

    A run meets at its port long after the port was chosen, and between the two gloo opens hundreds of sockets.
    """
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    share = 12_000 // int(workers)
    first = 20_000 + share * int(worker.removeprefix("gw"))
    # Another suite on this machine begins somewhere else.
    return itertools.islice(itertools.cycle(range(first, first + share)), os.getpid() % share, None)


_PORTS = _own_ports()


def free_port() -> int:
    """A port that nobody uses now, and that no other test will choose."""
    return next(filter(_is_free, _PORTS))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def train(
    runs: Sequence[Sequence[str]],
    world_size: int,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    module: str = "train",
    timeout: float = 600,
) -> list[Trained]:
    """Train one run after the other on the same processes, which saves most of their start.

    Args:
        runs: arguments of train.py for each.
        module: where `main` is.
    """
    plan = [
        {"arguments": [*arguments, "--run.output_dir", str(folder / str(number))], "port": free_port()}
        for number, arguments in enumerate(runs)
    ]
    with Processes(["-m", "tests.rank_worker", module, json.dumps(plan)], world_size, environment) as ranks:
        finished = ranks.finish(timeout)
    trained = []
    for number, run in enumerate(plan):
        codes = []
        for rank, (code, output) in enumerate(finished):
            marks = [line.split()[2] for line in output.splitlines() if line.startswith(f"RUN {number} ")]
            assert marks, f"rank {rank} (exit {code}) did not come to run {number}, {run['arguments']}:\n{output[-3000:]}"
            codes.append(int(marks[0]))
        left = list((folder / str(number)).glob("*/record.json"))
        assert len(left) == 1, f"run {number}, {run['arguments']}: codes {codes}\n{finished[0][1][-3000:]}"
        steps = (left[0].parent / "steps.jsonl").read_text().splitlines()
        outputs = [output for _, output in finished]
        trained.append(Trained(codes, json.loads(left[0].read_text()), [json.loads(line) for line in steps], outputs))
    return trained


def call(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120) -> None:
    """Call function(*arguments) in new processes that gloo joins; raise what the first failing one raises.

    Args:
        function: importable by name, as multiprocessing needs it.
        timeout: seconds until all are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.start_processes(
            _joined, (world_size, f"{folder}/store", function, arguments), nprocs=world_size, join=False, start_method="spawn"
        )
        assert ranks is not None
        ends = time.monotonic() + timeout
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > ends:
                    raise TimeoutError(f"{function.__name__}: {world_size} ranks took more than {timeout} s")
        finally:
            for process in ranks.processes:
                if process.is_alive():
                    process.kill()


def _joined(rank: int, world_size: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    waits = timedelta(seconds=20)  # for a partner that has failed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=waits)
    try:
        function(*arguments)
    finally:
        dist.destroy_process_group()
