"""Watches the ranks of a run from a thread: a run ends on all ranks, at once and with one cause, or it goes on.

A rank whose neighbour has died waits in a collective: in C++, deaf to signals and exceptions, until a time-out that names
nobody. So each rank has a thread that posts what it is doing, reads what the others do, and ends the process when the run has
failed. It cannot help a main thread that holds Python's lock for good.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from recipes.base import Comm
from training.collateral import cause_in_one_line, may_be_collateral
from training.processes import COMPILERS
from training.rank_board import Board, Failure, Neighbours
from training.rank_observer import Observer
from training.rank_status import DONE, ENDING, INTERRUPTED, RUNNING, heartbeat
from training.record import RunFailed
from training.timeline import Timeline
from training.wakeup import StopRequests, Wakeup, undisturbed

_TICK_SECONDS, _HURRY_SECONDS, _ARRIVAL_SECONDS = 1.0, 0.1, 5.0
_GRACE_SECONDS = 5.0
"""Longest time that a collective's error waits for its cause: a killed rank is known within two ticks."""
_REACT_SECONDS = 2.0
"""What the main thread gets to end by itself: its own end closes files that this thread does not know."""
_LINGER_SECONDS, _LINGER_DONE_SECONDS = 3.0, 10.0
_END_SECONDS = 15.0


class RankFailed(RunFailed):
    """Another rank ended the run; the message names it and its cause."""


class Watchdog:
    """Runs beside the loop, as a context manager around it; the loop sets `step`.

    An exception that leaves the body is replaced by RankFailed where another rank is its cause.

    Args:
        timeline: says how far this rank is, and what time it is.
        notify: prints one line. Called from another thread.
        end: closes the record when the main thread cannot: gets RankFailed or KeyboardInterrupt, in another thread, at most
            once, and never once the main thread closes it itself. The process exits when it returns.
        board: from `connect`; None in a run of one process, which has heartbeats and signals only.
        forecast_seconds: expected length of the first step. None: unknown.
        lost_after_seconds: silence after which a rank on another machine counts as dead; a compiler may hold Python's lock
            for a while.
        exit_process: os._exit; other threads may be blocked for good, so nothing else ends the process.
    """

    def __init__(
        self,
        timeline: Timeline,
        limits: Comm,
        notify: Callable[[str], None],
        end: Callable[[BaseException], None],
        *,
        rank: int = 0,
        world_size: int = 1,
        board: Board | None = None,
        forecast_seconds: float | None = None,
        lost_after_seconds: float = 60.0,
        compilers: Sequence[str] = COMPILERS,
        exit_process: Callable[[int], None] = os._exit,
    ):
        self.limits, self.notify, self.end, self.exit_process = limits, notify, end, exit_process
        self.rank, self.world_size, self.forecast_seconds, self.clock = rank, world_size, forecast_seconds, timeline.clock
        self.own = Observer(timeline, rank, compilers)
        self.neighbours = Neighbours(board, rank, world_size, lost_after_seconds, self.clock)
        self._heartbeats = 0
        self._failed_at: float | None = None
        self.stops = StopRequests()
        self._own_failure: Failure | None = None
        self._explained: BaseException | None = None
        self._has_stumbled = False
        self._leaving, self._stop = threading.Lock(), False
        self._news, self._hurry = threading.Condition(), False
        self._wakeup: Wakeup | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # --- the main thread's side ------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the run ended, once that is known."""
        return self.neighbours.failure

    @property
    def step(self) -> int:
        """The optimizer step that the loop is in. Setting it starts the step's clock."""
        return self.own.step[0]

    @step.setter
    def step(self, step: int) -> None:
        self.own.timeline.begin_step()
        self.own.set_step(step)

    def task(self, name: str) -> AbstractContextManager[None]:
        """Name what the loop does outside a step, for example validation: it has the first step's limit to itself."""
        return self.own.doing(name)

    def __enter__(self) -> Watchdog:
        """Begin to watch; what came before is not part of the first step."""
        self.own.begin()
        self._wakeup = Wakeup()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tell the others how this rank ended, then stop.

        Raises:
            RankFailed: if the run has failed on another rank, instead of what that caused here.
        """
        told = error
        with undisturbed():
            if error is not None:
                told = self.explain(error)
            elif self._explained is None:
                self._claim()
                told = None if self.failure is None else RankFailed(self.failure.message)
                self.own.state = DONE if told is None else ENDING
            self._stop = True
            self._ring()
            self._thread.join(_LINGER_DONE_SECONDS + 2)
            self.own.activity.stop()
            if self._wakeup is not None and not self._thread.is_alive():
                self._wakeup.close()
        if told is not None and told is not error:
            raise told from error

    def explain(self, error: BaseException) -> BaseException:
        """Return what ended the run: RankFailed if another rank did, else the error itself, after telling the others of it.

        An error that another rank may have caused waits a few seconds for news of that rank. From here on the record is the
        main thread's to close.
        """
        if self._explained is None:
            with undisturbed():
                self._claim()
                self._explained = self._cause_of(error) if self.world_size > 1 else error
        return self._explained

    def _cause_of(self, error: BaseException) -> BaseException:
        interrupted, collateral, behind = isinstance(error, KeyboardInterrupt), may_be_collateral(error), None
        if collateral:
            if interrupted and self.own.state == RUNNING:
                self.own.state = INTERRUPTED
            self._await(lambda: self.failure is not None or self.neighbours.all_leave(), _GRACE_SECONDS)
            if self.failure is not None:
                return RankFailed(self.failure.message)
            if self.stops.end_at is not None:  # the collective failed because all were asked to stop
                error, interrupted = KeyboardInterrupt(), True
        status = self.own.status()
        if interrupted:
            if self.neighbours.all_leave():
                return error
            self._own_failure = self._interruption()
        else:
            behind = self.neighbours.waiting_for(status) if collateral else None
            cause = cause_in_one_line(error) + (f"; {behind}" if behind else "")
            self._own_failure = Failure(self.rank, f"rank {self.rank} failed in {status.place}: {cause}")
        self._await(lambda: self.failure is not None, _LINGER_SECONDS)
        if collateral and self.failure is not None and (behind or self.failure != self._own_failure):
            return RankFailed(self.failure.message)
        return error

    def _interruption(self) -> Failure:
        return Failure(self.rank, f"rank {self.rank} was interrupted by a signal in {self.own.status().place}")

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        """Let the thread look around quickly until `condition` holds."""
        self._hurry = True
        self._ring()
        with self._news:
            self._news.wait_for(condition, seconds)
        self._hurry = False

    def _ring(self) -> None:
        if self._wakeup is not None:
            self._wakeup.ring()

    def _claim(self) -> None:
        """Take the right to end the run from the thread, or wait to be ended by it."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait(_END_SECONDS + _LINGER_SECONDS)

    # --- the thread's side -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self._wakeup is not None
        while not self._stop:
            self._tick_whatever_happens()
            self._end_if_blocked()
            waited = self.clock() - self.own.entered
            arriving = waited < _ARRIVAL_SECONDS and len(self.neighbours.statuses) < self.world_size - 1
            hurry = arriving or self._hurry or self._failed_at is not None or self.stops.end_at is not None
            signals = self._wakeup.sleep(_HURRY_SECONDS if hurry else max(_TICK_SECONDS, self.world_size / 64))
            if signals:
                self.stops.hear(self.clock())
        self._linger()

    def _tick_whatever_happens(self) -> None:
        try:
            self.tick()
        except Exception:
            if not self._has_stumbled:  # once: it looks again every second
                traceback.print_exc()
            self._has_stumbled = True

    def tick(self) -> None:
        """Look around once: post, read, judge, and say so."""
        if self.stops.end_at is not None and self.own.state == RUNNING:
            self.own.state = INTERRUPTED
        self.neighbours.exchange(self.own.status(), self._own_failure)
        if self.own.state == RUNNING and not self._leaving.locked():
            self._check_limit()
        if self.failure is not None and self._failed_at is None:
            self._failed_at = self.clock()
            if self.own.state != DONE:
                self.own.state = ENDING
                self.neighbours.exchange(self.own.status(), None)
        self._heartbeat()
        with self._news:
            self._news.notify_all()

    def _check_limit(self) -> None:
        (step, began), task = self.own.step, self.own.task
        is_first = step <= self.own.first_step or task is not None
        limit = self.limits.first_step_timeout_seconds if is_first else self.limits.step_timeout_seconds
        elapsed = self.clock() - (task[1] if task else began)
        if elapsed < limit or self.neighbours.board is None or self.failure is not None:
            return
        option = f"comm.{'first_' if is_first else ''}step_timeout_seconds"
        what = task[0] if task else f"step {max(step, 1)}"
        self.neighbours.fail(self.neighbours.overdue(self.own.status(), what, elapsed, limit, option))

    def _heartbeat(self) -> None:
        elapsed = self.clock() - self.own.entered
        due = int(elapsed / self.limits.heartbeat_seconds)
        if self.rank != 0 or self.own.state != RUNNING or due <= self._heartbeats or self.own.first_step_is_over:
            return
        self._heartbeats = due
        text = heartbeat(self.own.status(), self.neighbours.statuses.values(), elapsed, self.forecast_seconds)
        with contextlib.suppress(OSError, ValueError):  # a closed terminal is no reason to stop watching
            self.notify(text)

    # --- how it ends -----------------------------------------------------------------------------------------------------

    def _end_if_blocked(self) -> None:
        """End the process if the main thread had its time and did not."""
        now = self.clock()
        if self.failure is not None and self._failed_at is not None and now - self._failed_at >= _REACT_SECONDS:
            error: BaseException = RankFailed(self.failure.message)
        elif self.failure is None and self.stops.end_at is not None and now - self.stops.end_at >= 2 * _REACT_SECONDS:
            error = KeyboardInterrupt()
        else:
            return
        if not self._leaving.acquire(blocking=False):
            return
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        guard = threading.Timer(_END_SECONDS, self.exit_process, [code])  # a lost device may block whoever asks it anything
        guard.daemon = True
        guard.start()
        if code == 130 and not self.neighbours.all_leave():
            self.neighbours.fail(self._interruption())
        try:
            self.end(error)
        except BaseException:
            traceback.print_exc()
        self._linger()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        guard.cancel()
        self.exit_process(code)

    def _linger(self) -> None:
        """Post the end, and stay until the others know of it: the store, or a launcher that kills them, goes with us."""
        began, longest = self.clock(), _LINGER_DONE_SECONDS if self.own.state == DONE else _LINGER_SECONDS
        # An interrupted rank has still to read that the others are interrupted too.
        shortest = 5 * _HURRY_SECONDS if self.own.state == INTERRUPTED else 0.0
        self.tick()
        needed = self.neighbours.depend_on_us or self.failure is not None
        while needed and self.neighbours.board is not None and (stayed := self.clock() - began) < longest:
            if stayed >= shortest and self.neighbours.may_leave():
                return
            threading.Event().wait(_HURRY_SECONDS)
            self.tick()
