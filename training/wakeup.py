"""Signals, seen by a thread other than the main one.

Python runs signal handlers in the main thread, between two of its own instructions: never while that thread is blocked in a
collective. The C handler before it writes the signal's number to a file descriptor, and that one a thread can wait for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass

_open: set[Wakeup] = set()
STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop."""
SAME_REQUEST_SECONDS = 1.0
"""Signals this close are one request: a launcher and the terminal send one each."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no signal raise anything in the body: launchers send one to ranks that are ending already. A Wakeup still hears it.

    Outside of the main thread it does nothing, and need not.
    """
    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in STOPS:
            previous[number] = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass
class StopRequests:
    """Signals to stop, as they come in. The first ends the process, or, where the loop answers it, the second."""

    patient: bool = False
    """Whether the loop answers the first request: it finishes its step and saves."""
    asked_at: float | None = None
    end_at: float | None = None
    """When the process was asked to end without more ado. None: not yet."""

    def hear(self, now: float) -> None:
        """Take note of a signal.

        Args:
            now: seconds, on any one clock.
        """
        if self.patient and self.asked_at is None:
            self.asked_at = now
        elif self.end_at is None and (self.asked_at is None or now - self.asked_at > SAME_REQUEST_SECONDS):
            self.end_at = now


class Wakeup:
    """A pipe that a thread sleeps on: `ring` and signals wake it. Open it in the main thread, or it hears no signals."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)
        self._previous: int | None = None
        with contextlib.suppress(ValueError):  # not the main thread
            self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _open.add(self)

    def ring(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full of reasons to wake up
            os.write(self._write, b"\0")

    def sleep(self, seconds: float) -> list[int]:
        """Wait that long at most; return the signals that have asked to stop. Others only end the sleep."""
        if not self._poll.poll(1000 * seconds):
            return []
        return [number for number in os.read(self._read, 4096) if number in STOPS]

    def close(self) -> None:
        """Give the signals back to whoever had them before."""
        _open.discard(self)
        if self._previous is not None:
            signal.set_wakeup_fd(self._previous)
        os.close(self._read)
        os.close(self._write)


def _forget() -> None:
    """A forked child shares the pipe: a signal sent to it alone would be taken for one to its parent."""
    if _open:
        signal.set_wakeup_fd(-1)
        _open.clear()


os.register_at_fork(after_in_child=_forget)
