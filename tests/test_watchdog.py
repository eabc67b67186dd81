"""A run ends on all ranks, soon and with one cause, whatever happens to one of them."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from recipes.base import Comm
from tests.fake_backend import FakeClock
from tests.ranks import Processes
from training import timeline as phases
from training import watchdog as watchdog_module
from training.collateral import may_be_collateral
from training.processes import ChildCompiler, ChildCompilers, machine_id, read_process
from training.rank_board import Board, Failure, Neighbours, connect
from training.rank_observer import CompileActivity, Observer
from training.rank_status import DONE, RUNNING, Status, furthest_behind, heartbeat, waiting_for
from training.record import RunFailed
from training.timeline import Timeline
from training.wakeup import STOPS, Wakeup, undisturbed
from training.watchdog import Watchdog
from training.world import World

needs_proc = pytest.mark.skipif(machine_id() is None, reason="needs /proc")


def status(rank=0, *, step=3, num_marks=10, phase="forward", state=RUNNING, **others):
    values = {"pid": 4000 + rank, "started": 1, "host": "h", "machine": None, "beat": 1, "seconds": 9.0} | others
    return Status(rank=rank, step=step, num_marks=num_marks, phase=phase, state=state, **values)


# --- what is said of ranks ----------------------------------------------------------------------------------------------


def test_a_status_survives_the_store():
    full = status(2, compiler=ChildCompiler("neuronx-cc", 4711, 28.0, 98.2), compiling="Block.forward", location="f (a.py:3)")
    assert Status.decode(full.encode().encode()) == full
    assert Status.decode(status().encode().encode()) == status()


@pytest.mark.parametrize(
    "statuses, behind",
    [
        ([status(0), status(1, num_marks=8)], [1]),
        ([status(0, step=4, num_marks=10), status(1)], [1]),
        ([status(0), status(1)], []),
        ([status(0), status(1, compiling="f")], [1]),
        ([status(0), status(1, compiler=ChildCompiler("g++", 1, 1.0, None))], [1]),
        ([status(0, collective="all_reduce"), status(1)], [1]),
        ([status(0, collective="all_reduce"), status(1, compiling="f"), status(2)], [1]),
        ([status(0, state=DONE), status(1)], [1]),
        ([status(0, state=DONE)], []),
    ],
)
def test_who_is_behind(statuses, behind):
    assert [found.rank for found in furthest_behind(statuses)] == behind


def test_the_rank_that_is_waited_for_is_named_with_what_it_does():
    """Case E18."""
    waits = status(0, collective="all_reduce")
    assert waiting_for([waits, status(1, compiling="Block.forward", compiling_seconds=12.3)], []) == (
        "waiting for rank 1 (compiling Block.forward for 12 s)"
    )
    assert waiting_for([waits], [1]) == "waiting for rank 1 (has not come to the first step yet)"
    assert waiting_for([status(0), status(1)], []) is None
    many = waiting_for([status(0), *(status(rank, num_marks=1) for rank in range(1, 9))], [])
    assert many is not None and many.endswith("and 4 more")


def test_the_heartbeat_names_the_compiler():
    """Case B16."""
    slow = status(1, compiler=ChildCompiler("neuronx-cc", 4711, 28.0, 98.2))
    assert heartbeat(status(0), [slow], 30.0, 256.0) == (
        "first step: 30 s of about 256 s; rank 0 in forward for 9 s; "
        "slowest: rank 1, compiling forward for 28 s (neuronx-cc, pid 4711, 98 % CPU)"
    )
    assert heartbeat(status(0), [], 30.0, None) == "first step: 30 s; in forward for 9 s"


# --- who is gone --------------------------------------------------------------------------------------------------------


class Pair:
    """Rank 0's view of a rank 1 that the test speaks for."""

    def __init__(self):
        self.clock, self.board = FakeClock(100.0), Board(dist.HashStore(), 2, held_by_rank_0=False)
        self.neighbours = Neighbours(self.board, 0, 2, 60.0, self.clock)

    def look(self, other=None):
        if other is not None:
            self.board.post(other)
        self.neighbours.exchange(status(0), None)
        return self.neighbours.failure


def test_a_silent_rank_on_another_machine_is_lost_after_a_while():
    pair = Pair()
    for beat in range(100):
        pair.clock.advance(1)
        assert pair.look(status(1, beat=beat)) is None
    for _ in range(60):
        pair.clock.advance(1)
        assert pair.look() is None
    pair.clock.advance(1)
    failure = pair.look()
    assert failure is not None and failure.rank == 1
    assert failure.message.startswith("rank 1 (pid 4001 on h) is gone: no sign of life for 61 s, last seen in step 3, forward")


def test_a_watchdog_that_was_stopped_itself_accuses_nobody():
    pair = Pair()
    pair.look(status(1))
    pair.clock.advance(500)
    assert pair.look() is None


@needs_proc
def test_a_process_that_is_gone_is_noticed_at_once_unless_it_said_that_it_is_done():
    child = subprocess.Popen(["sleep", "60"])
    process = read_process(child.pid)
    assert process is not None
    here = {"pid": child.pid, "started": process.started, "machine": machine_id()}
    pair = Pair()
    assert pair.look(status(1, **here)) is None
    child.kill()
    while (process := read_process(child.pid)) is not None and process.is_alive:
        time.sleep(0.01)  # until it is a zombie: nobody has collected it yet
    assert pair.look(status(1, state=DONE, **here)) is None
    failure = pair.look(status(1, **here))
    child.wait()
    assert failure is not None and failure.message == (
        f"rank 1 (pid {child.pid} on h) is gone: its process ended without a word, last seen in step 3, forward "
        "(killed, or out of memory?)"
    )


@needs_proc
def test_a_pid_that_is_used_again_is_another_process():
    assert status(1, pid=os.getpid(), started=1, machine=machine_id()).process_is_alive is False
    assert status(1, pid=os.getpid(), started=1, machine="elsewhere").process_is_alive is None


def test_the_first_failure_counts():
    board = Board(dist.HashStore(), 2, held_by_rank_0=False)
    assert board.failure() is None
    assert board.fail(Failure(1, "first")) == board.fail(Failure(0, "second")) == board.failure() == Failure(1, "first")


# --- limits and heartbeats, at a clock that the test moves --------------------------------------------------------------


class Scene:
    """A watchdog without its thread."""

    def __init__(self, world_size=2, **keywords):
        self.clock, self.said = FakeClock(100.0), []
        self.board = Board(dist.HashStore(), world_size, held_by_rank_0=False) if world_size > 1 else None
        timeline = Timeline(self.clock, age=lambda: 0.0)
        self.timeline = timeline
        limits = Comm(first_step_timeout_seconds=10.0, step_timeout_seconds=4.0, heartbeat_seconds=3.0)
        self.watchdog = Watchdog(
            timeline, limits, self.said.append, lambda error: None, world_size=world_size, board=self.board, **keywords
        )

    def pass_time(self, seconds, other=None):
        for beat in range(seconds):
            self.clock.advance(1)
            if other is not None:
                self.board.post(other._replace(beat=beat, compiling_seconds=other.compiling_seconds + beat))
            self.watchdog.tick()
        return self.watchdog.failure


def test_a_first_step_that_takes_too_long_ends_with_the_rank_that_compiles():
    """Case B3."""
    scene = Scene()
    scene.watchdog.step = 1
    scene.timeline.mark(phases.FIRST_BATCH)
    other = status(1, step=1, num_marks=1, compiling="Block.forward", compiling_seconds=3.0)
    assert scene.pass_time(9, other) is None
    failure = scene.pass_time(1, other)
    assert failure == Failure(
        1,
        "step 1 has taken 10 s, the limit is 10 s (comm.first_step_timeout_seconds): waiting for rank 1 (compiling "
        "Block.forward for 3 s); raise the limit if that is how long it takes",
    )
    assert scene.board is not None and scene.board.failure() == failure
    assert [line.partition(";")[0] for line in scene.said] == ["first step: 3 s", "first step: 6 s", "first step: 9 s"]
    assert "slowest: rank 1, compiling Block.forward" in scene.said[0]


def test_later_steps_have_their_own_limit_and_tasks_do_not_count():
    scene = Scene()
    scene.watchdog.step = 2
    other = status(1, step=2, num_marks=0)
    assert scene.pass_time(3, other) is None
    with scene.watchdog.task("validation"):
        assert scene.pass_time(9, other) is None
    assert scene.pass_time(3, other) is None
    failure = scene.pass_time(1, other)
    assert failure is not None and "step 2 has taken 4 s, the limit is 4 s (comm.step_timeout_seconds)" in failure.message
    assert scene.said == []


def test_one_process_has_heartbeats_and_no_limit():
    scene = Scene(world_size=1)
    scene.watchdog.step = 1
    assert scene.pass_time(40) is None
    assert len(scene.said) == 13
    scene.timeline.mark(phases.OPTIMIZER)
    scene.pass_time(10)
    assert len(scene.said) == 13


def test_a_status_between_steps_says_so():
    clock = FakeClock(5.0)
    timeline = Timeline(clock, age=lambda: 0.0)
    observer = Observer(timeline, 0, ())
    observer.set_step(1)
    clock.advance(1)
    timeline.mark(phases.OPTIMIZER)
    assert observer.status().phase == "between steps"
    clock.advance(1)
    observer.set_step(2)
    assert observer.status().phase == "first batch"


# --- what it looks at ---------------------------------------------------------------------------------------------------


def from_gloo():
    return RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize(
    "error, collateral",
    [
        (from_gloo(), True),
        (dist.DistBackendError("anything"), True),
        (RuntimeError("nrt_execute status=5"), True),
        (ConnectionResetError(), True),
        (KeyboardInterrupt(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("gloo is spelt with o"), False),
        (RunFailed("the loss is not finite; a collective would hide it"), False),
    ],
)
def test_which_errors_wait_for_news(error, collateral):
    assert may_be_collateral(error) is collateral


def test_compilation_is_named_by_the_function():
    import torch._dynamo

    activity, seen = CompileActivity(), []

    class Block(torch.nn.Module):
        def forward(self, x):
            return x + 1

    def compiler(graph, _):
        seen.append(activity.current)
        return graph

    torch._dynamo.reset()
    activity.listen()
    try:
        torch.compile(Block(), backend=compiler)(torch.ones(2))
    finally:
        activity.stop()
    assert seen[0] is not None and seen[0][0].endswith("Block.forward") and activity.current is None
    assert torch._dynamo.callback_handler.start_callbacks == []


def test_dynamo_is_not_imported_to_listen_to_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.callback")
    CompileActivity().listen()
    assert "torch._dynamo.callback" not in sys.modules


@contextmanager
def fake_compiler(folder):
    """A child process that the system knows as neuronx-cc."""
    script = folder / "neuronx-cc"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    child = subprocess.Popen([script], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.communicate(b"end\n")


@needs_proc
def test_a_child_compiler_is_found_until_it_ends(tmp_path):
    compilers = ChildCompilers(["neuronx-cc"])
    with fake_compiler(tmp_path) as child:
        while compilers.look(0.0) is None:
            time.sleep(0.01)
        found = compilers.look(2.0)
        assert found is not None and (found.name, found.pid, found.seconds) == ("neuronx-cc", child.pid, 2.0)
        assert found.cpu_percent is not None and found.cpu_percent < 50
    assert compilers.look(3.0) is None


def test_a_signal_wakes_the_thread_and_not_that_of_the_parent():
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    old = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = Wakeup()
    try:
        assert wakeup.sleep(0.0) == []
        wakeup.ring()
        assert wakeup.sleep(5.0) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert wakeup.sleep(5.0) == [signal.SIGTERM]
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        assert wakeup.sleep(0.05) == []
    finally:
        wakeup.close()
        signal.signal(signal.SIGTERM, old)
    assert signal.set_wakeup_fd(before) == before


def test_a_signal_does_not_disturb_the_end():
    """torchrun sends SIGTERM to the survivors while they look for the cause."""
    handlers = [signal.getsignal(number) for number in STOPS]
    with undisturbed():
        for number in STOPS:
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in STOPS] == handlers


def test_leaving_normally_and_by_an_error_of_ones_own():
    timeline, limits = Timeline(), Comm()
    with Watchdog(timeline, limits, print, print) as watchdog:
        watchdog.step = 1
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    began = time.monotonic()
    with pytest.raises(ValueError, match="mine"), Watchdog(timeline, limits, print, print):
        raise ValueError("mine")
    assert time.monotonic() - began < 2.5


# --- several processes --------------------------------------------------------------------------------------------------

several = pytest.mark.distributed
SECONDS = {"first": 60.0, "later": 60.0, "heartbeat": 60.0}


def ranks(scenario, world_size, **options):
    return Processes(["-m", "tests.test_watchdog", json.dumps({"scenario": scenario, **SECONDS, **options})], world_size)


@several
def test_a_killed_rank_ends_the_others():
    """Rank 3 waits for the victim and gets gloo's error; ranks 0 and 1 wait for each other, and nothing would wake them."""
    with ranks("killed", 4, victim=2) as started:
        started.processes[2].wait(40)
        finished = started.finish(15)
    for rank in (0, 1, 3):
        code, output = finished[rank]
        assert code == 1 and f"rank 2 (pid {started.processes[2].pid} on" in output, output
        assert "is gone: its process ended without a word, last seen in step 3, forward" in output
    assert any("ended:" in finished[rank][1] for rank in (0, 1)) and "error:" in finished[3][1]


@several
def test_the_death_of_rank_0_takes_the_store_and_is_named():
    with ranks("killed", 2, victim=0) as started:
        started.processes[0].wait(40)
        (_, _), (code, output) = started.finish(15)
    assert code == 1 and f"rank 0 (pid {started.processes[0].pid} on" in output, output
    assert "which holds the rendezvous store, is gone" in output or "is gone: its process ended" in output, output


@several
def test_all_ranks_cite_the_rank_whose_compiler_failed():
    """Cases B15 and E17."""
    with ranks("raises", 2) as started:
        finished = started.finish(40)
    for code, output in finished:
        assert code == 1 and "exit status 70" in output, output
    assert "rank 1 failed in step 3, forward: CalledProcessError" in finished[0][1]


@several
def test_a_time_out_names_the_rank_that_compiles():
    """Cases B3, B16 and E18."""
    with ranks("compiles", 2, first=3.0, heartbeat=1.0) as started:
        finished = started.finish(40)
    for code, output in finished:
        assert code == 1 and "the limit is 3 s (comm.first_step_timeout_seconds): waiting for rank 1 (compiling" in output, (
            output
        )
    beats = [line for line in finished[0][1].splitlines() if line.startswith("first step: ")]
    assert len(beats) >= 2 and "waiting in all_reduce; slowest: rank 1, compiling" in beats[-1]


@several
def test_one_process_names_its_compiler(tmp_path):
    """Case B16."""
    with ranks("child", 1, heartbeat=1.0, folder=str(tmp_path)) as started:
        ((code, output),) = started.finish(40)
    beats = [line for line in output.splitlines() if line.startswith("first step: ")]
    assert code == 0 and len(beats) >= 2 and all("neuronx-cc, pid" in line for line in beats[1:]), output


@several
def test_a_rank_that_finishes_is_not_gone():
    for first in (0, 1):  # rank 0 holds the store
        with ranks("finishes", 2, victim=first) as started:
            assert [(code, output) for code, output in started.finish(40) if code or "error" in output] == []


@several
@pytest.mark.parametrize("everybody", [True, False], ids=["all ranks", "one rank"])
def test_a_signal_ends_a_blocked_rank(everybody):
    with ranks("blocks", 2) as started:
        for process in started.processes:
            process.wait_for("blocked")
        for process in started.processes if everybody else started.processes[1:]:
            process.send(signal.SIGTERM)
        finished = started.finish(15)
    assert [code for code, _ in finished] == [130 if everybody else 1, 130], finished
    if not everybody:
        assert "rank 1 was interrupted by a signal in step 3" in finished[0][1]


def work(scenario, *, first, later, heartbeat, victim=None, folder=None):
    """One rank of the tests above."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    watchdog_module._TICK_SECONDS, watchdog_module._REACT_SECONDS = 0.3, 0.6  # in proportion to runs this short
    callbacks = importlib.import_module("torch._dynamo.callback") if scenario == "compiles" else None
    world, timeline = World.from_environment(), Timeline()
    board = None
    if world.size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        board = connect(world.size)

    def block():
        print("blocked", flush=True)
        dist.recv(torch.ones(1), src={0: 1, 1: 0, 2: 3, 3: 2}[world.rank])

    def third_step():
        if scenario == "killed" and world.rank == victim:
            time.sleep(3 * watchdog_module._TICK_SECONDS)  # until the others have read where it is
            os.kill(os.getpid(), signal.SIGKILL)
        elif scenario in ("blocks", "killed"):
            block()
        elif scenario == "raises" and world.rank == 1:
            subprocess.run(["sh", "-c", "exit 70"], check=True)
        elif scenario == "finishes" and world.rank != victim:
            time.sleep(1.5)

    def first_step():
        if scenario == "compiles" and world.rank == 1:
            with callbacks.callback_handler.install_callbacks(callbacks.CallbackTrigger.DYNAMO, "0/0"):
                time.sleep(60)
        if scenario == "child":
            with fake_compiler(folder):
                time.sleep(3.5)

    watchdog = Watchdog(
        timeline,
        Comm(first_step_timeout_seconds=first, step_timeout_seconds=later, heartbeat_seconds=heartbeat),
        lambda line: print(line, flush=True),
        lambda error: print("ended:", error, flush=True),
        rank=world.rank,
        world_size=world.size,
        board=board,
    )
    with watchdog:
        for step in range(1, 4):
            watchdog.step = step
            timeline.mark(phases.FIRST_BATCH)
            {1: first_step, 3: third_step}.get(step, lambda: None)()
            if world.size > 1 and not (scenario == "finishes" and step == 3):
                dist.all_reduce(torch.ones(1))
            for phase in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER):
                timeline.mark(phase)
            timeline.close()


if __name__ == "__main__":
    from pathlib import Path

    options = json.loads(sys.argv[1])
    if "folder" in options:
        options["folder"] = Path(options["folder"])
    try:
        work(**options)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        print("error:", error, flush=True)
        sys.exit(1)
