"""What ranks tell each other: they agree on the work or refuse it, wait their turn, and know how long they wait."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from recipes import command_line
from recipes.base import Comm, RecipeError
from tests.fake_backend import FakeBackend
from tests.ranks import Processes, call
from training.distributed import Ranks, RanksDisagree
from training.world import World

DEBUG = command_line.load("debug")


def test_one_process_answers_for_itself():
    ranks = Ranks(DEBUG, World())
    ranks.connect(FakeBackend())
    ranks.arrange(FakeBackend())
    assert not dist.is_initialized()
    assert (ranks.replicas, ranks.shards, ranks.tensor, ranks.data, ranks.data_rank) == (1, 1, 1, 1, 0)
    assert ranks.axis("dp_shard") is None
    assert ranks.gather("me") == ["me"] and ranks.from_main(lambda: 7) == 7
    assert ranks.sum_losses([torch.tensor(2.0)]) == [2.0]
    ranks.require_same({"seed": 0})
    ranks.barrier()
    ranks.shorten_timeout(pytest.fail)
    ranks.close()


@pytest.mark.parametrize(
    ("tensor", "replicate", "size", "expected"), [(4, 1, 64, (1, 16, 4, 16)), (2, 2, 8, (2, 2, 2, 4)), (1, 1, 8, (1, 8, 1, 8))]
)
def test_neighbours_share_matrices_then_shards_then_replicas(tensor, replicate, size, expected):
    parallel = replace(DEBUG.parallel, tensor_parallel_degree=tensor, data_parallel_replicate_degree=replicate)
    ranks = Ranks(replace(DEBUG, parallel=parallel), World(size - 1, size, size - 1, size))
    assert (ranks.replicas, ranks.shards, ranks.tensor, ranks.data) == expected
    assert ranks.data_rank == ranks.data - 1


def connected(**comm: float) -> Ranks:
    """Ranks of the group that the test has already joined, with a control group of their own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(replace(DEBUG, comm=replace(Comm(), **comm)), World(rank, size, rank, size))
    ranks._control = dist.new_group(backend="gloo")  # type: ignore[assignment]
    return ranks


def check_conversation() -> None:
    ranks, rank = connected(), dist.get_rank()
    assert ranks.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert ranks.from_main(lambda: f"made on {rank}") == "made on 0"
    assert ranks.sum_losses([torch.tensor(1.0 + rank), torch.tensor(10.0)]) == [3.0, 20.0]

    def refuse():
        raise RecipeError("the folder cannot be written")

    with pytest.raises(RecipeError, match="the folder cannot be written"):  # raised where it happened, and everywhere else
        ranks.from_main(refuse)

    # B18: another depth on one rank. Both sides are named, on every rank.
    ranks.require_same({"model.num_layers": 2})
    with pytest.raises(RanksDisagree, match=r"model\.num_layers is '2' on rank 0 and '3' on rank 1"):
        ranks.require_same({"seed": 0, "model.num_layers": str(2 + rank)})


def check_turns(path: str) -> None:
    ranks = connected()
    with ranks.first_on_each_host(), open(path, "a") as file:
        file.write(f"{dist.get_rank()}\n")


def check_timeouts() -> None:
    ranks = connected(first_step_timeout_seconds=1800.0, step_timeout_seconds=42.5)
    notes: list[str] = []
    ranks.shorten_timeout(notes.append)
    assert notes == []
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 42.5

    # B7: a process group that cannot change its time-out, as torch reports it.
    original = dist.distributed_c10d._set_pg_timeout
    dist.distributed_c10d._set_pg_timeout = lambda *_: warnings.warn(
        "Set timeout is now only supported for either nccl or gloo.", stacklevel=1
    )
    try:
        ranks.shorten_timeout(notes.append)
    finally:
        dist.distributed_c10d._set_pg_timeout = original
    assert len(notes) == 1 and "keep 1800 s" in notes[0] and "more than 42.5 s" in notes[0]


@pytest.mark.distributed
def test_b18_ranks_talk_and_refuse_to_do_different_work():
    call(check_conversation, 2)


@pytest.mark.distributed
def test_others_wait_until_the_first_of_their_host_is_done(tmp_path):
    call(check_turns, 3, str(tmp_path / "order"))
    lines = (tmp_path / "order").read_text().split()
    assert lines[0] == "0" and sorted(lines) == ["0", "1", "2"]


@pytest.mark.distributed
def test_b7_b8_the_time_out_of_later_steps():
    call(check_timeouts, 2)


@pytest.mark.distributed
def test_b18_a_rank_that_was_started_otherwise_ends_all(tmp_path):
    """Two launches that differ in one flag, joined by one rendezvous."""
    layers = "['--model.num_layers', str(2 + int(os.environ['RANK']))]"
    program = f"import os, sys, train; sys.exit(train.main(sys.argv[1:] + {layers}))"
    arguments = ["debug", "--tiny", "--run.output_dir", str(tmp_path / "runs")]
    with Processes(["-c", program, *arguments], 2) as processes:
        finished = processes.finish(120)
    for rank, (code, output) in enumerate(finished):
        assert code == 1, output
        assert f"error: rank {rank}: the ranks are not about to do the same work: model.num_layers is '2' on rank 0" in output
    assert not (tmp_path / "runs").exists(), "nothing was written"
