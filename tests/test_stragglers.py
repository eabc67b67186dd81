"""The slowest rank of each phase, and when it is worth a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durable import ended
from tests.ranks import Processes
from tests.test_train import TINY
from training import timeline as phases
from training.stragglers import Straggler, stragglers
from training.timeline import Timeline


def test_the_slowest_rank_of_each_phase():
    found = stragglers([{"first_batch": 1.0, "forward": 10.0}, {"first_batch": 9.0, "forward": 10.1}, {"first_batch": 1.2}], 10)
    assert found == [Straggler("first_batch", 1, 0.9, pytest.approx(0.12)), Straggler("forward", 1, 1.01, 1.0)]
    assert [straggler.is_noteworthy for straggler in found] == [True, False]
    assert str(found[0]) == "first batch: rank 1, 0.900 s a step (median 0.120 s)"


def test_where_there_is_nothing_to_compare():
    assert stragglers([{"forward": 1.0}], 10) == [] and stragglers([{}, {}], 0) == []
    assert not Straggler("forward", 0, 0.004, 0.0001).is_noteworthy, "a clock's chance is no straggler"


def test_later_steps_are_timed_without_what_lies_between_them():
    now = [0.0]
    timeline = Timeline(lambda: now[0], lambda: 0.0)
    timeline.begin_step()
    for phase in phases.PHASES:
        now[0] += 1.0
        timeline.mark(phase)
    timeline.close()
    for _ in range(3):
        now[0] += 100.0  # a validation, a checkpoint
        timeline.begin_step()
        for phase, seconds in (
            (phases.FIRST_BATCH, 0.25),
            (phases.FORWARD, 1.0),
            (phases.BACKWARD, 2.0),
            (phases.FORWARD, 1.0),
        ):
            now[0] += seconds
            timeline.mark(phase)
    assert timeline.later_steps == 3
    assert timeline.later_seconds == {phases.FIRST_BATCH: 0.75, phases.FORWARD: 6.0, phases.BACKWARD: 6.0}
    assert timeline.phases[phases.FORWARD].seconds == 1.0, "the first step stays what it was"


@pytest.mark.distributed
def test_a_rank_with_slow_data_is_named(tmp_path: Path):
    program = (
        "import os, sys, time, train\n"
        "from training.data import PackedBatches\n"
        "def slowly(self, ask=PackedBatches.__next__):\n"
        "    time.sleep(0.05 * (os.environ['RANK'] == '1'))\n"
        "    return ask(self)\n"
        "PackedBatches.__next__ = slowly\n"
        "sys.exit(train.main())"
    )
    arguments = [*TINY, "--training.steps", "8", "--run.output_dir", str(tmp_path)]
    with Processes(["-c", program, *arguments], 2) as ranks:
        finished = ranks.finish(120)
    assert [code for code, _ in finished] == [0, 0], finished
    assert "straggler in first batch: rank 1, 0.0" in finished[0][1], finished[0][1]
    (record,) = tmp_path.glob("*/record.json")
    found = {each["phase"]: each for each in ended(0, record.parent).record["timing"]["stragglers"]}
    assert set(found) == {"first_batch", "forward", "backward", "optimizer"}
    assert found["first_batch"]["rank"] == 1 and found["first_batch"]["seconds"] > 0.05
