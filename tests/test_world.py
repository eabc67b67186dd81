"""Which process this is: what the launcher says is read, and a launch that cannot work is refused before torch loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes.base import RecipeError
from training.world import World

LAUNCHED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher_there_is_one_process():
    assert World.from_environment({}) == World(rank=0, size=1, local_rank=0, local_size=1)
    assert World.from_environment({}).is_main


def test_torchruns_variables_are_read():
    assert World.from_environment(LAUNCHED) == World(rank=5, size=8, local_rank=1, local_size=4)
    assert not World.from_environment(LAUNCHED).is_main


def test_one_launched_process_needs_nothing_else():
    assert World.from_environment({"WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launch_is_refused_with_the_command(missing: str):
    environment = {name: value for name, value in LAUNCHED.items() if name != missing}
    with pytest.raises(RecipeError, match=rf"WORLD_SIZE is 8, but {missing} is not set; .*torchrun --nproc_per_node 8"):
        World.from_environment(environment)


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_numbers_that_contradict_each_other_are_refused(change: dict[str, str]):
    with pytest.raises(RecipeError, match="do not fit together"):
        World.from_environment(LAUNCHED | change)


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "four"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1"), ("RANK", "1.0"), ("RANK", "")]
)
def test_what_is_no_number_is_refused(name: str, value: str):
    with pytest.raises(RecipeError, match=f"{name}: got {value!r}, allowed: a whole number"):
        World.from_environment(LAUNCHED | {name: value})


def test_reading_it_costs_no_torch():
    code = "import sys, training.world; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
