"""What this rank is doing now, seen from a thread beside the loop."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

from training import timeline as phases
from training.processes import ChildCompilers, machine_id, read_process
from training.rank_status import RUNNING, Status
from training.timeline import Timeline

_COLLECTIVES = "/torch/distributed/"
_NOT_A_NAME = ("wrapper", "__call__", "_call_impl", "<lambda>")


class Observer:
    """Puts this rank's status together.

    Args:
        compilers: how the names of compilers begin that run as processes of their own.
    """

    def __init__(self, timeline: Timeline, rank: int, compilers: Sequence[str]):
        self.timeline, self.rank, self.clock = timeline, rank, timeline.clock
        self.state = RUNNING
        self.activity, self._compilers = CompileActivity(self.clock), ChildCompilers(compilers)
        process = read_process(os.getpid())
        self._identity = (os.getpid(), process.started if process else 0, socket.gethostname(), machine_id())
        self._beat = 0
        self.begin()

    def begin(self) -> None:
        """Start all clocks."""
        self.entered = self.clock()
        self.first_step = 1  # a resumed run begins later
        # Each is replaced as a whole, so the thread never sees a step with another step's time.
        self.step: tuple[int, float] = (0, self.entered)
        self.task: tuple[str, float] | None = None

    def set_step(self, step: int) -> None:
        """Note that the loop begins this step, or goes on with it after a task."""
        self.step = (step, self.clock())

    @contextlib.contextmanager
    def doing(self, task: str) -> Iterator[None]:
        """Name what the loop does outside a step; its time belongs to no step."""
        self.task = (task, self.clock())
        try:
            yield
        finally:
            self.set_step(self.step[0])
            self.task = None

    @property
    def first_step_is_over(self) -> bool:
        """Whether the first optimizer step has been done."""
        return self.step[0] > self.first_step or (self.step[0] == self.first_step and self._step_is_over())

    def _step_is_over(self) -> bool:
        progress = self.timeline.progress
        return progress.last_phase == phases.OPTIMIZER and progress.last_mark_at >= self.step[1]

    def status(self) -> Status:
        """Look, and return what is to be seen."""
        now, (step, began), task, progress = self.clock(), self.step, self.task, self.timeline.progress
        phase, since = progress.current_phase, max(progress.last_mark_at, self.entered)
        if task is not None:
            phase, since = task
        elif step and self._step_is_over():
            phase = "between steps"
        self.activity.listen()
        self._beat += 1
        compiling = self.activity.current
        # To walk through all processes takes milliseconds: worth it only where somebody waits.
        slow = not self.first_step_is_over or now - (task[1] if task else began) > 5
        collective, location = main_thread_position() if slow else (None, None)
        return Status(
            self.rank,
            *self._identity,
            self._beat,
            self.state,
            step,
            progress.num_marks,
            phase,
            now - since,
            compiling[0] if compiling else None,
            now - compiling[1] if compiling else 0.0,
            self._compilers.look(now) if slow else None,
            collective,
            location,
        )


class CompileActivity:
    """Knows what torch.compile is compiling now. Never imports it: in eager mode there may be nothing to listen to.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.current: tuple[str, float] | None = None
        """What, and since when."""
        self._handler: Any = None

    def listen(self) -> None:
        """Begin to listen as soon as Dynamo is there; call it now and then, for torch._dynamo.reset() sends listeners away."""
        if self._handler is None:
            self._handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._handler is not None and self._begin not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._begin)
            self._handler.register_end_callback(self._end)

    def stop(self) -> None:
        """Listen no more."""
        if self._handler is not None and self._begin in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._begin)
            self._handler.remove_end_callback(self._end)
        self._handler = None

    def _begin(self, event: Any) -> None:
        lazy = event.callback_trigger.name == "LAZY_BACKWARD"
        self.current = ("the backward pass" if lazy else _function_compiled() or f"graph {event.compile_id}", self.clock())

    def _end(self, event: Any) -> None:
        self.current = None


def _function_compiled() -> str | None:
    """Name the function that Dynamo was called for. Its callbacks do not say; the frame that calls them has it as `code`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return None
        code = frame.f_locals.get("code")
        if isinstance(code, CodeType):
            return code.co_qualname
        frame = frame.f_back
    return None


def main_thread_position() -> tuple[str | None, str | None]:
    """Return the function of torch.distributed that the main thread is in, if any, and its innermost line of our own."""
    identity = threading.main_thread().ident
    if identity == threading.get_ident():
        return None, None  # it would see itself look
    frame = sys._current_frames().get(identity) if identity is not None else None
    collective, depth = None, 0
    while frame is not None:
        code = frame.f_code
        # Hooks put torch.distributed into the stack of ordinary work too; who waits in it has it at the very top.
        if collective is None and depth < 4 and _COLLECTIVES in code.co_filename and code.co_name not in _NOT_A_NAME:
            collective = code.co_name
        if not ("site-packages" in code.co_filename or code.co_filename.startswith(("<", sys.base_prefix))):
            return collective, f"{code.co_qualname} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
        frame, depth = frame.f_back, depth + 1
    return collective, None
