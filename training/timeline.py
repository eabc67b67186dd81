"""Where the wait before the first useful step goes: contiguous phases, from process creation to the end of step 1."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

IMPORTS = "interpreter_and_imports"
PROCESS_GROUP = "process_group"
DATA = "data_and_run_folder"
MODEL_BUILD = "model_build"
PARALLELISE = "parallelise"
MATERIALISE = "materialise_load"
OPTIMIZER_BUILD = "optimizer_build"
FIRST_BATCH = "first_batch"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"

BEFORE_LOOP = (IMPORTS, PROCESS_GROUP, DATA, MODEL_BUILD, PARALLELISE, MATERIALISE, OPTIMIZER_BUILD)
FIRST_STEP = (FIRST_BATCH, FORWARD, BACKWARD, OPTIMIZER)
PHASES = BEFORE_LOOP + FIRST_STEP
"""Every phase, in order. Their seconds sum to time_to_first_step_seconds; those of FIRST_STEP to first_step_seconds."""


Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class CompileTotals:
    """What compiling has cost so far in this process; subtract two of them. None: unknown."""

    compile_seconds: float | None = 0.0
    """Whole compilations, tracing included."""
    trace_seconds: float | None = 0.0
    """The part of compile_seconds before a graph reaches the compile backend."""
    cache_hits: int | None = 0
    cache_misses: int | None = 0

    def since(self, before: CompileTotals) -> CompileTotals:
        """Return this minus `before`, field by field; unknown in either stays unknown."""
        return CompileTotals(*map(difference, vars(self).values(), vars(before).values()))

    def plus(self, other: CompileTotals) -> CompileTotals:
        """Return the sum, field by field; unknown in either stays unknown."""
        return CompileTotals(
            *(None if a is None or b is None else a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


def difference(now: Number | None, before: Number | None) -> Number | None:
    """Return now minus before, or None where either is unknown."""
    return None if now is None or before is None else now - before


@dataclass
class Phase:
    """Wall seconds of one phase and the compilation inside them."""

    seconds: float = 0.0
    compile: CompileTotals = field(default_factory=CompileTotals)


class Progress(NamedTuple):
    """How far the loop is, as another thread may see it. Ranks of one run pass the same marks in the same order."""

    num_marks: int
    last_phase: str | None
    """The phase that ended last."""
    last_mark_at: float
    """When that was, on the timeline's clock."""

    @property
    def current_phase(self) -> str:
        """What has been going on since then, in words. After a backward pass only the loop knows what comes next."""
        if self.last_phase == BACKWARD:
            return "forward or optimizer"
        following = PHASES.index(self.last_phase) + 1 if self.last_phase else 0
        # After the optimizer's phase the loop asks for the batches of the next step.
        return (PHASES[following] if following < len(PHASES) else FIRST_BATCH).replace("_", " ")


class Timeline:
    """Splits the time since the process was created into phases without gaps.

    Each `mark` ends the phase that it names; the next phase begins at the same moment. After `close` a mark only notes how far
    the loop is, so the loop may keep them in its body and only step 1 pays for the synchronisation.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, age: Callable[[], float | None] | None = None):
        """Start at the creation of the process.

        Args:
            clock: seconds, monotonic.
            age: seconds since the process was created. None: as the operating system reports it.
        """
        self.clock = clock
        seconds_alive = (age or process_age)()
        self.starts_at_process_creation = seconds_alive is not None
        self._began = self._last = clock() - (seconds_alive or 0.0)
        self._synchronize: Callable[[], None] = lambda: None
        self._compile_totals: Callable[[], CompileTotals] = CompileTotals
        self._compile_last = CompileTotals()
        self.open = True
        self.progress = Progress(0, None, self._last)
        """Replaced as a whole at every mark, so another thread never reads half of it."""
        self.phases: dict[str, Phase] = {name: Phase() for name in PHASES}
        self.later_seconds: dict[str, float] = {}
        """Of the loop's phases after the first step, all steps together; the device is not waited for."""
        self.later_steps = 0

    def attach(self, synchronize: Callable[[], None], compile_totals: Callable[[], CompileTotals]) -> None:
        """Wait for the device and read what compiling has cost at every mark from here on."""
        self._synchronize, self._compile_totals = synchronize, compile_totals
        self._compile_last = compile_totals()

    def mark(self, phase: str) -> None:
        """End `phase` now; a phase marked twice accumulates."""
        if not self.open:
            now = self.clock()
            self.progress = Progress(self.progress.num_marks + 1, phase, now)
            self.later_seconds[phase] = self.later_seconds.get(phase, 0.0) + now - self._last
            self._last = now
            return
        self._synchronize()
        now, compiled = self.clock(), self._compile_totals()
        self.progress = Progress(self.progress.num_marks + 1, phase, now)
        entry = self.phases[phase]
        entry.seconds += now - self._last
        entry.compile = entry.compile.plus(compiled.since(self._compile_last))
        self._last, self._compile_last = now, compiled

    def begin_step(self) -> None:
        """Let the phases of a later step begin now: what came between the steps is not part of them."""
        if not self.open:
            self._last = self.clock()
            self.later_steps += 1

    def close(self) -> None:
        """End the first step: what comes after is not part of the wait."""
        self.open = False

    def elapsed(self) -> float:
        """Return the seconds since the process was created, or since this object was, where that is unknown."""
        return self.clock() - self._began

    @property
    def first_step_seconds(self) -> float:
        """From the loop asking for its first batch to the synchronised end of the first optimizer step."""
        return sum(self.phases[name].seconds for name in FIRST_STEP)

    @property
    def time_to_first_step_seconds(self) -> float | None:
        """From the creation of the process to the same end. None: the system does not report process creation."""
        return sum(phase.seconds for phase in self.phases.values()) if self.starts_at_process_creation else None


def process_age() -> float | None:
    """Return the seconds since the operating system created this process, or None where it does not say.

    Source: proc(5), field 22 of /proc/[pid]/stat: start time in clock ticks since boot.
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None
