"""What Linux says in /proc of this process, its children and its neighbours. None: it does not say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

COMPILERS = ("neuronx-cc", "neuron-cc", "ptxas", "cicc", "nvcc", "cc1plus", "g++", "c++", "clang")
"""How the names of compilers begin that run as processes of their own."""

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""The unit of what /proc says of times."""


class Process(NamedTuple):
    """One line of /proc/[pid]/stat."""

    pid: int
    name: str
    """At most 15 characters."""
    state: str
    """One letter: Z is a process that has ended and was not collected yet, X one that is being removed."""
    started: int
    """Clock ticks since boot. With the pid it names a process for good: pids are used again."""
    cpu_seconds: float
    """Of all its threads and of the children that it has waited for."""

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything."""
        return self.state not in "ZX"


class ChildCompiler(NamedTuple):
    """A compiler that runs as a descendant of this process."""

    name: str
    pid: int
    seconds: float
    """Since it was first seen."""
    cpu_percent: float | None
    """Of one core, with its own children, since the last look. None: it was not there at the last look."""


def read_process(pid: int) -> Process | None:
    """Return what the system says of a process, or None where there is none.

    Source: proc(5), /proc/[pid]/stat; the name stands in brackets and may itself contain brackets and spaces.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # a watchdog reads that of every rank every second
            before, _, after = file.read().rpartition(b")")
        fields = after.decode("ascii").split()
        used = sum(int(fields[index]) for index in (11, 12, 13, 14))
        return Process(
            pid, before.partition(b"(")[2].decode(errors="replace"), fields[0], int(fields[19]), used / TICKS_PER_SECOND
        )
    except (OSError, ValueError, IndexError):
        return None


@cache
def machine_id() -> str | None:
    """Return what is the same for two processes if and only if they see each other's pids; None without /proc.

    Containers on one host may share its name and not its pids, so the name does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}" if read_process(os.getpid()) else None
    except OSError:
        return None


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of a process's children, their children and so on; nothing where the kernel does not list them."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


class ChildCompilers:
    """Finds compilers among the descendants of this process and measures how busy they are.

    Args:
        names: how the names of compilers begin.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._seen: dict[tuple[int, int], tuple[float, float, float]] = {}  # first seen, last seen, CPU seconds then

    def look(self, now: float) -> ChildCompiler | None:
        """Return the compiler that has been running for longest, or None if none is."""
        seen, found = {}, []
        for pid in descendants(os.getpid()):
            process = read_process(pid)
            if process is None or not process.is_alive or not process.name.startswith(self.names):
                continue
            family = filter(None, map(read_process, descendants(pid)))
            used = process.cpu_seconds + sum(member.cpu_seconds for member in family)
            key = (pid, process.started)
            first, last, used_then = self._seen.get(key, (now, now, used))
            share = max(0.0, 100 * (used - used_then) / (now - last)) if now > last else None
            seen[key] = (first, now, used)
            found.append(ChildCompiler(process.name, pid, now - first, share))
        self._seen = seen
        return max(found, key=lambda compiler: compiler.seconds, default=None)
