"""The phases of the wait leave no gap and do not overlap."""

import os
import time

import pytest

from training.timeline import FIRST_STEP, PHASES, CompileTotals, Timeline, process_age


class Script:
    """A clock and a compile counter that move together."""

    def __init__(self):
        self.now, self.compiled, self.waits = 50.0, CompileTotals(), 0

    def clock(self):
        return self.now

    def totals(self):
        return self.compiled

    def wait(self):
        self.waits += 1


def test_phases_sum_to_the_whole():
    script = Script()
    timeline = Timeline(script.clock, age=lambda: 2.5)
    for seconds, name in enumerate(PHASES, start=1):
        script.now += seconds
        timeline.mark(name)
    timeline.close()
    script.now += 1_000
    timeline.mark(FIRST_STEP[0])  # step 2 passes the same marks
    assert timeline.time_to_first_step_seconds == 2.5 + sum(range(1, len(PHASES) + 1))
    assert timeline.first_step_seconds == sum(range(len(PHASES) - 3, len(PHASES) + 1))
    assert timeline.phases[PHASES[0]].seconds == 3.5  # what passed before Python could look at a clock belongs to it


def test_micro_batches_accumulate_in_their_phases():
    script = Script()
    timeline = Timeline(script.clock, age=lambda: 0.0)
    for _ in range(4):
        script.now += 2
        timeline.mark("forward")
        script.now += 3
        timeline.mark("backward")
    assert (timeline.phases["forward"].seconds, timeline.phases["backward"].seconds) == (8, 12)


def test_compilation_is_booked_on_the_phase_that_it_happened_in():
    """Cases A17 and A18: what the first call costs is compile time of that call, not of wrapping the module."""
    script = Script()
    timeline = Timeline(script.clock, age=lambda: 0.0)
    timeline.mark("parallelise")
    timeline.attach(script.wait, script.totals)
    script.now += 51
    script.compiled = CompileTotals(compile_seconds=48.0, trace_seconds=5.0, cache_hits=0, cache_misses=1)
    timeline.mark("forward")
    script.now += 9
    script.compiled = CompileTotals(compile_seconds=56.0, trace_seconds=5.0, cache_hits=0, cache_misses=2)
    timeline.mark("backward")
    assert timeline.phases["parallelise"].compile.compile_seconds == 0.0
    assert timeline.phases["forward"].compile == CompileTotals(48.0, 5.0, 0, 1)
    assert timeline.phases["backward"].compile == CompileTotals(8.0, 0.0, 0, 1)
    assert script.waits == 2


def test_unknown_cache_counters_stay_unknown():
    unknown = CompileTotals(compile_seconds=1.0, trace_seconds=None, cache_hits=None, cache_misses=0)
    assert unknown.since(CompileTotals()) == CompileTotals(1.0, None, None, 0)
    assert CompileTotals(1.0, 1.0, 1, 1).plus(unknown) == CompileTotals(2.0, None, None, 1)


def test_a_system_that_does_not_report_process_creation_gives_no_figure():
    timeline = Timeline(lambda: 1.0, age=lambda: None)
    timeline.mark("forward")
    assert timeline.time_to_first_step_seconds is None
    assert timeline.first_step_seconds == 0.0


def test_another_thread_can_tell_what_the_loop_is_doing():
    script = Script()
    timeline = Timeline(script.clock, age=lambda: 0.0)
    timeline.attach(script.wait, script.totals)
    seen = [timeline.progress.current_phase]
    for name in (*PHASES[:-1], "forward", "backward", "optimizer"):
        timeline.mark(name)
        seen.append(timeline.progress.current_phase)
    assert seen == [
        *(name.replace("_", " ") for name in PHASES[: PHASES.index("backward") + 1]),
        *("forward or optimizer", "backward", "forward or optimizer", "first batch"),
    ]


def test_progress_goes_on_after_the_first_step_without_waiting_for_the_device():
    script = Script()
    timeline = Timeline(script.clock, age=lambda: 0.0)
    timeline.attach(script.wait, script.totals)
    timeline.mark("forward")
    timeline.close()
    waits, script.now = script.waits, 70.0
    timeline.mark("first_batch")
    assert timeline.progress == (2, "first_batch", 70.0)
    assert script.waits == waits and timeline.phases["first_batch"].seconds == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_process_age_moves_with_the_clock():
    before = process_age()
    start = time.perf_counter()
    while time.perf_counter() - start < 0.05:
        pass
    after = process_age()
    assert before is not None and after is not None and before > 0
    assert 0.03 < after - before < 5.0
