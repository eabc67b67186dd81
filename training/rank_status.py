"""What one rank is doing, as it tells the others, and who of them is behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from training.processes import ChildCompiler, machine_id, read_process

RUNNING = "running"
INTERRUPTED = "interrupted"
"""Asked to stop by a signal."""
ENDING = "ending"
"""Ends because of a failure that it knows of."""
DONE = "done"


class Status(NamedTuple):
    """Only the rank itself writes these values; times are lengths, so that no two clocks are compared."""

    rank: int
    pid: int
    started: int
    """With the pid, names the process for good."""
    host: str
    machine: str | None
    """Equal where ranks see each other's pids. None: unknown."""
    beat: int
    """Changes with every message: a rank that is alive."""
    state: str
    step: int
    num_marks: int
    """Phases ended so far; with the step it orders ranks by how far they are."""
    phase: str
    seconds: float
    """In this phase so far."""
    compiling: str | None = None
    """What torch.compile is compiling."""
    compiling_seconds: float = 0.0
    compiler: ChildCompiler | None = None
    collective: str | None = None
    """The function of torch.distributed that the main thread is in."""
    location: str | None = None
    """The innermost line of the main thread outside of installed packages."""

    def encode(self) -> str:
        """Return the text that `decode` reads."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: bytes) -> Status:
        """Read what `encode` wrote."""
        status = cls(*json.loads(text))
        return status._replace(compiler=ChildCompiler(*status.compiler)) if status.compiler else status

    @property
    def is_compiling(self) -> bool:
        """Whether anything is being compiled, by torch.compile or by a compiler of its own."""
        return self.compiling is not None or self.compiler is not None

    @property
    def process_is_alive(self) -> bool | None:
        """Whether the process is still there; None: it is on another machine. A pid that is used again is another process."""
        if self.machine is None or self.machine != machine_id():
            return None
        process = read_process(self.pid)
        return process is not None and process.is_alive and process.started == self.started

    @property
    def process(self) -> str:
        """Name the process: an operator looks for it by pid and host."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def place(self) -> str:
        """Say where in the run it is."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase

    @property
    def doing(self) -> str:
        """Say what it is doing and for how long."""
        if self.compiling is not None:
            text = f"compiling {self.compiling} for {self.compiling_seconds:.0f} s"
        elif self.compiler is not None:
            text = f"compiling {self.phase} for {self.compiler.seconds:.0f} s"
        elif self.collective is not None:
            text = f"in {self.phase} for {self.seconds:.0f} s, waiting in {self.collective}"
        else:
            text = f"in {self.phase} for {self.seconds:.0f} s" + (f", at {self.location}" if self.location else "")
        if self.compiler is not None:
            cpu = "CPU n/a" if self.compiler.cpu_percent is None else f"{self.compiler.cpu_percent:.0f} % CPU"
            text += f" ({self.compiler.name}, pid {self.compiler.pid}, {cpu})"
        return text


def furthest_behind(statuses: Collection[Status]) -> list[Status]:
    """Return the ranks that the others wait for; none where nothing tells them apart.

    Among ranks at the same mark those that compile are behind those that do not, and those that have not come to a collective
    are behind those that wait in one.
    """
    active = [status for status in statuses if status.state == RUNNING]
    if not active:
        return []
    least = min((status.step, status.num_marks) for status in active)
    behind = [status for status in active if (status.step, status.num_marks) == least]
    slower_ones: tuple[Callable[[Status], bool], ...] = (
        lambda status: status.is_compiling,
        lambda status: status.compiler is not None,  # torch.compile may itself wait for another rank's compiler
        lambda status: status.collective is None,
    )
    for slower in slower_ones:
        fewer = [status for status in behind if slower(status)]
        behind = fewer or behind
    return behind if len(behind) < len(statuses) else []


def waiting_for(statuses: Collection[Status], missing: Sequence[int]) -> str | None:
    """Say whom the others wait for and what those do, or None where nobody is behind.

    Args:
        missing: ranks that have not said anything yet.
    """
    behind = [(rank, "has not come to the first step yet") for rank in missing]
    behind = behind or [(status.rank, status.doing) for status in furthest_behind(statuses)]
    if not behind:
        return None
    named = ", ".join(f"rank {rank} ({doing})" for rank, doing in behind[:4])
    return f"waiting for {named}" + (f" and {len(behind) - 4} more" if len(behind) > 4 else "")


def heartbeat(own: Status, others: Collection[Status], elapsed: float, forecast_seconds: float | None) -> str:
    """Return the line that says that the first step is still going on."""
    forecast = "" if forecast_seconds is None else f" of about {forecast_seconds:.0f} s"
    text = f"first step: {elapsed:.0f} s{forecast}; {f'rank {own.rank} ' if others else ''}{own.doing}"
    slowest = furthest_behind([*others, own])
    if slowest and own not in slowest:
        text += f"; slowest: rank {slowest[0].rank}, {slowest[0].doing}"
    return text
