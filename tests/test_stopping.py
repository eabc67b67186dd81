"""How a run is stopped before its end, and that it goes on from there as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from recipes.base import Run
from tests.durable import ended, run
from tests.ranks import ROOT
from tests.test_train import TINY
from training.stopping import OUT_OF_TIME, Stopping
from training.wakeup import SAME_REQUEST_SECONDS, StopRequests

FOREVER = ["--training.steps", "100000", "--run.log_every", "1"]


def at_step(monkeypatch, step: int, act) -> None:
    """Let something happen in the middle of a step."""
    from training.metrics import Meter

    add = Meter.add

    def add_and_act(self, number: int, *values) -> None:
        if number == step:
            act()
        add(self, number, *values)

    monkeypatch.setattr(Meter, "add", add_and_act)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(number: signal.Signals, tmp_path: Path, monkeypatch):
    whole = run(tmp_path / "whole", "--checkpoint.every_steps", "8", steps=8)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda: os.kill(os.getpid(), number))
        stopped = run(tmp_path / "runs", steps=8)
    assert stopped.code == 128 + number
    assert stopped.record["status"] == "interrupted"
    assert stopped.record["cause"] == f"{number.name}: stopped after step 5; --resume goes on from there"
    assert [save["step"] for save in stopped.record["checkpoints"]["saves"]] == [5]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    went_on = run(tmp_path / "runs", "--resume", "--checkpoint.every_steps", "8", steps=8)
    assert stopped.steps + went_on.steps == whole.steps and went_on.state(8) == whole.state(8)


def test_a_stop_file(tmp_path: Path, monkeypatch):
    file = tmp_path / "stop"
    at_step(monkeypatch, 4, file.touch)
    stopped = run(tmp_path / "runs", "--run.stop_file", str(file), steps=8)
    assert stopped.code == 143 and stopped.store.complete_steps() == [4]
    assert stopped.record["cause"].startswith("run.stop_file is there: stopped after step 4")


def test_a_budget_ends_the_run_in_time_to_save(tmp_path: Path):
    """A process of its own: the budget counts from its creation."""
    command = [sys.executable, "train.py", *TINY, *FOREVER, "--run.output_dir", str(tmp_path), "--run.budget_minutes", "0.2"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 75, done.stdout[-2000:] + done.stderr[-2000:]
    (record,) = tmp_path.glob("*/record.json")
    stopped = ended(75, record.parent)
    assert stopped.record["cause"].startswith("run.budget_minutes is over: stopped after step ")
    assert stopped.store.complete_steps() == [stopped.steps[-1]["step"]]


@pytest.mark.parametrize(
    ("save", "last"),
    [
        (None, 5),  # a tenth of the minute is kept for a save that nobody has seen yet, and twice the step of 9 s
        (10.0, 4),  # 2 * 9 + 2 * 10 + 1 = 39: not after step 3 (18.5)
        (0.1, 6),  # 2 * 9 + 2 * 0.1 + 1 = 19.2: not after step 5 (36.5)
    ],
)
def test_what_is_kept_of_a_budget_for_the_end(save: float | None, last: int):
    """Steps of 9 s after a first one that ends at 0.5 s."""
    now = 0.5
    alone: Any = SimpleNamespace(world=SimpleNamespace(size=1), watchdog=SimpleNamespace(stops=StopRequests()))
    with Stopping(Run(budget_minutes=1.0), alone, lambda: now, lambda: save) as stopping:
        stopping.arm()
        for step in range(2, 10):
            now += 9.0
            if (reason := stopping.after_step(step)) is not None:
                break
    assert step == last and reason is not None and reason.exit_code == OUT_OF_TIME


def test_a_second_signal_ends_at_once(tmp_path: Path):
    """The step takes for ever: the first signal waits for its end, the second does not."""
    program = (
        "import sys, time, train\n"
        "from training.metrics import Meter\n"
        "def add(self, step, *values, add=Meter.add):\n"
        "    add(self, step, *values)\n"
        "    if step == 3:\n"
        "        print('stuck', flush=True)\n"
        "        while True: time.sleep(0.05)\n"
        "Meter.add = add\n"
        "sys.exit(train.main())"
    )
    command = [sys.executable, "-u", "-c", program, *TINY, *FOREVER, "--run.output_dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        try:
            while "stuck" not in (line := job.stdout.readline()):
                assert line, "ended early"
            job.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(SAME_REQUEST_SECONDS + 0.5)
            job.send_signal(signal.SIGTERM)
            assert job.wait(10) == 130
        finally:
            job.kill()
    (record,) = tmp_path.glob("*/record.json")
    stopped = ended(130, record.parent)
    assert stopped.record["status"] == "interrupted" and stopped.record["checkpoints"]["saves"] == []


def test_which_signals_are_one_request():
    """A launcher and the terminal send one each."""
    impatient, patient = StopRequests(), StopRequests(patient=True)
    for now in (10.0, 10.2, 10.9):
        impatient.hear(now)
        patient.hear(now)
    assert impatient.end_at == 10.0 and patient.end_at is None and patient.asked_at == 10.0
    patient.hear(11.5)
    assert patient.end_at == 11.5


def test_before_the_first_step_is_over_a_signal_ends_the_process(tmp_path: Path, monkeypatch, request):
    # A suite that was started in the background has been told to ignore it.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)))
    at_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    code = train.main([*TINY, "--training.steps", "8", "--run.output_dir", str(tmp_path)])
    (record,) = tmp_path.glob("*/record.json")
    stopped = ended(code, record.parent)
    assert code == 130 and stopped.record["status"] == "interrupted" and stopped.record["checkpoints"]["saves"] == []


def test_a_stop_that_cannot_be_saved_has_failed(tmp_path: Path, monkeypatch):
    at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    (tmp_path / "file").write_text("")
    stopped = run(tmp_path / "runs", "--checkpoint.folder", str(tmp_path / "file"), steps=8)
    assert stopped.code == 1 and stopped.record["status"] == "failed"
    assert f"{tmp_path}/file" in stopped.record["cause"] and "the newest complete checkpoint is none" in stopped.record["cause"]
