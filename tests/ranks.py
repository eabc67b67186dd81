"""Several processes, for tests: starts the ranks, ends them, and reads what they left."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

ROOT = Path(__file__).resolve().parent.parent

_FORKS = multiprocessing.get_context("forkserver")
# Of the whole test process. It begins with the first that is forked from it, and ends with the test process.
_FORKS.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
        "torch.nn.parallel",
        "torch._dynamo.backends.debugging",
        "torch._inductor.compile_fx",
        "tokenizers",
        "tyro",
        "rich.console",
        "rich.progress",
    ]
)


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
    """Processes with the variables that torchrun would give them. As a context manager it ends them.

    They are forked from a process that has imported torch: most of what a short run takes is importing it.
    """

    def __init__(
        self, command: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None, *, root: Path = ROOT
    ):
        """Start them.

        Args:
            command: `-m MODULE ARGUMENT ...` or `-c PROGRAM ARGUMENT ...`, as Python takes them.
            environment: is added to that of this process.
            root: working directory, and first on the path.
        """
        base = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            base.pop(name, None)
        if world_size > 1:
            base |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
            base.setdefault("MASTER_PORT", str(free_port()))
        self.processes = [
            Rank(command, base if world_size == 1 else base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, root)
            for rank in range(world_size)
        ]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.end()

    def finish(self, timeout: float) -> list[tuple[int, str]]:
        """Wait for all, and return the exit code and the output of each.

        Args:
            timeout: seconds for all of them together. When one is killed, those that wait for it get no more than 30 seconds.
        """
        ends = time.monotonic() + timeout
        while running := [process for process in self.processes if process.returncode is None]:
            multiprocessing.connection.wait([process.sentinel for process in running], max(0.0, ends - time.monotonic()))
            codes = [process.returncode for process in self.processes]
            if time.monotonic() >= ends and None in codes:
                tails = "".join(f"\n--- rank {rank}\n{process.output[-8000:]}" for rank, process in enumerate(self.processes))
                raise TimeoutError(f"exit codes when the time was over: {codes}{tails}")
            if any(code is not None and code < 0 for code in codes):
                ends = min(ends, time.monotonic() + 30)
        return [process.wait(0) for process in self.processes]


class Rank:
    """One process of `Processes`, in a session of its own: children of it, for example compilers, end with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], root: Path):
        reading, writing = multiprocessing.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_run, args=(writing, list(command), dict(environment), str(root)))
        self._process.start()
        writing.close()
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(os.fdopen(os.dup(reading.fileno()), errors="replace"),))
        self._reader.start()
        reading.close()

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                with self._news:
                    self._lines.append(line)
                    self._news.notify_all()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Ready when the process has ended."""
        return self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        """What it has printed so far."""
        with self._news:
            return "".join(self._lines)

    def wait(self, timeout: float) -> tuple[int, str]:
        """Wait for its end, and return exit code and output."""
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutError(f"still running after {timeout} s:\n{self.output[-3000:]}")
        self._reader.join(10)  # its children may hold the pipe for longer than it lived
        return self.returncode, self.output

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Wait until a line with this text has been printed."""
        with self._news:
            assert self._news.wait_for(lambda: any(text in line for line in self._lines), timeout), "".join(self._lines)

    def kill(self) -> None:
        """Kill it, if it still runs, and leave its children."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and its children, if they still run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._reader.join()


def _run(output: Connection, command: list[str], environment: dict[str, str], root: str) -> None:
    """Become what `python COMMAND` with this environment would be."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(root)
    sys.path[:0] = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    faulthandler.enable()
    if "FIRSTSTEP_SIMULATED_NEURON" in environment:  # torch was imported without it
        importlib.import_module("torch_neuronx")._autoload()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # root may have its own
    kind, program, *arguments = command
    sys.argv[:] = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(program, vars(main))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


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
        given = (world_size, f"{folder}/store", function, arguments)
        ranks = start_processes(_joined, given, nprocs=world_size, join=False, start_method="forkserver")
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
        dist.barrier()  # a rank that leaves early breaks the connections that another is still making
    finally:
        dist.destroy_process_group()
