"""The short form of the crash campaign: `make crash-campaign` is the long one."""

import pytest

from tests.crash_campaign import KINDS, campaign


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_run_that_is_killed_again_and_again_ends_like_one_that_was_not(kind):
    said: list[str] = []
    counts = campaign(3, 7, [kind], said.append)
    assert counts.faults == [], "\n".join(said)
    assert sum(counts.kills.values()) == 3 and counts.finished_stories >= 1
