"""What the ranks of one run tell each other beside their collectives, in keys of torch's store, and who of them is gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from training.rank_status import INTERRUPTED, RUNNING, Status, furthest_behind, waiting_for

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # documented, yet not in the stubs

T = TypeVar("T")
_FAILURE = "failure"
_TIMEOUT = timedelta(seconds=10)
"""Longest answer of the store: of a machine that vanished no other sign comes."""


class StoreLost(Exception):
    """The store does not answer any more."""


class Failure(NamedTuple):
    """Why the run ended. All ranks cite the same one."""

    rank: int | None
    """The rank that is to blame. None: nothing tells."""
    message: str


class Board:
    """The store, as the watchdogs of one run use it. Not thread-safe: one thread of each rank talks to it.

    Args:
        held_by_rank_0: whether the store ends with rank 0, which must then be the last to leave.
    """

    def __init__(self, store: Store, world_size: int, held_by_rank_0: bool):
        self.store, self.held_by_rank_0 = store, held_by_rank_0
        self.world_size = world_size
        self._absent = set(range(world_size))

    def post(self, status: Status) -> None:
        """Replace this rank's status."""
        _answer(lambda: self.store.set(f"status/{status.rank}", status.encode()))

    def statuses(self) -> dict[int, Status]:
        """Return what every rank that has posted anything posted last."""

        def read() -> dict[int, Status]:
            # To read a key that is not there would block.
            self._absent = {rank for rank in self._absent if not self.store.check([f"status/{rank}"])}
            present = sorted(set(range(self.world_size)) - self._absent)
            texts = self.store.multi_get([f"status/{rank}" for rank in present]) if present else []
            return {status.rank: status for status in map(Status.decode, texts)}

        return _answer(read)

    def failure(self) -> Failure | None:
        """Return the failure of the run, if there is one."""
        if not _answer(lambda: self.store.check([_FAILURE])):
            return None
        return Failure(*json.loads(_answer(lambda: self.store.get(_FAILURE))))

    def fail(self, failure: Failure) -> Failure:
        """Post the failure of the run unless there is one already; return the one that counts."""
        return Failure(*json.loads(_answer(lambda: self.store.compare_set(_FAILURE, "", json.dumps(failure)))))


def connect(world_size: int, environment: Mapping[str, str] = os.environ) -> Board:
    """Open a connection of its own to the store that the process group met at, as MASTER_ADDR and MASTER_PORT name it.

    The process group's own connection would not do: a rank that waits on it keeps every other thread out. Call it after the
    process group exists. Each restart by torchrun posts under keys of its own.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    run, restart = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    client = TCPStore(address, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    held_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Board(PrefixStore(f"firststep/{run}/{restart}", client), world_size, held_by_rank_0=not held_by_agent)


def _answer(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise StoreLost(next(iter(str(error).splitlines()), "")) from error


class Neighbours:
    """The other ranks of the run, as far as their posts and their processes tell.

    Args:
        board: None in a run of one process.
        lost_after_seconds: silence after which a rank on another machine counts as dead.
    """

    def __init__(self, board: Board | None, rank: int, world_size: int, lost_after_seconds: float, clock: Callable[[], float]):
        self.board, self.rank, self.world_size = board, rank, world_size
        self.lost_after_seconds, self.clock = lost_after_seconds, clock
        self.statuses: dict[int, Status] = {}
        """What each other rank posted last; a rank that has not come yet is not there."""
        self.failure: Failure | None = None
        """Why the run ended, once that is known."""
        self._heard: dict[int, tuple[int, float]] = {}
        self._last_read = clock()

    @property
    def depend_on_us(self) -> bool:
        """Whether the others lose the store when this rank leaves."""
        return self.board is not None and self.board.held_by_rank_0 and self.rank == 0

    def exchange(self, own: Status, failure: Failure | None) -> None:
        """Post what we do, read what the others do, and find out why the run ended.

        Args:
            failure: posted, unless there is one already.
        """
        if self.board is None:
            return
        try:
            self._exchange(self.board, own, failure)
        except StoreLost:
            self._lose_store(self.board, own)

    def fail(self, failure: Failure) -> None:
        """Post a failure; what counts from here on is the first one that any rank has posted."""
        if self.board is not None and self.failure is None:
            try:
                self.failure = self.board.fail(failure)
            except StoreLost:
                self.failure = failure

    def _exchange(self, board: Board, own: Status, failure: Failure | None) -> None:
        now = self.clock()
        board.post(own)
        # Replaced as a whole: the main thread may be reading it.
        self.statuses = {rank: status for rank, status in board.statuses().items() if rank != own.rank}
        was_stuck = now - self._last_read > 5  # then it is no wonder that nobody was heard
        self._last_read = now
        for rank, status in self.statuses.items():
            beat, heard_at = self._heard.get(rank, (-1, now))
            self._heard[rank] = (status.beat, now if was_stuck or beat != status.beat else heard_at)
        if self.failure is None:
            found = board.failure() or failure or (self._lost(board) if own.state in (RUNNING, INTERRUPTED) else None)
            self.failure = board.fail(found) if found is not None else None

    def _lost(self, board: Board) -> Failure | None:
        for status in self.statuses.values():
            how = self.how_lost(status)
            # It may have told why it leaves after we read what it does.
            if how is not None and board.statuses()[status.rank].state == RUNNING:
                return board.failure() or Failure(status.rank, f"{status.process} is gone: {how}")
        return None

    def how_lost(self, status: Status) -> str | None:
        """Say how a rank was lost that has not said goodbye, or None."""
        if status.state != RUNNING:
            return None
        is_alive = status.process_is_alive
        if is_alive:
            return None
        if is_alive is not None:
            return f"its process ended without a word, last seen in {status.place} (killed, or out of memory?)"
        silent = self.clock() - self._heard[status.rank][1]
        if silent <= self.lost_after_seconds:
            return None
        return f"no sign of life for {silent:.0f} s, last seen in {status.place} (killed, or machine or network lost?)"

    def _lose_store(self, board: Board, own: Status) -> None:
        """Go on unheard if whoever holds the store left in peace; else that is why the run ends."""
        self.board = None
        if own.state not in (RUNNING, INTERRUPTED) or self.failure is not None or self.depend_on_us:
            return
        if not board.held_by_rank_0:
            if own.state == RUNNING:  # a launcher that interrupts us ends as well
                self.failure = Failure(None, "the launcher, which holds the rendezvous store, does not answer: is it gone?")
            return
        holder = self.statuses.get(0)
        if holder is None:
            self.failure = Failure(0, "rank 0, which holds the rendezvous store, is gone before it said anything")
        elif holder.state == RUNNING:
            deadline = self.clock() + 2
            while holder.process_is_alive and self.clock() < deadline:  # its sockets close before its process is gone
                time.sleep(0.1)
            how = "does not answer: stuck" if holder.process_is_alive else "is gone: killed, or out of memory"
            if holder.process_is_alive is None:
                how = "is gone: killed, or machine or network lost"
            self.failure = Failure(0, f"{holder.process}, which holds the rendezvous store, {how}? last seen in {holder.place}")

    def all_leave(self) -> bool:
        """Whether every other rank has said that it ends, or nobody can be heard any more."""
        everybody = self.board is None or len(self.statuses) == self.world_size - 1
        return everybody and all(self.board is None or status.state != RUNNING for status in self.statuses.values())

    def may_leave(self) -> bool:
        """Whether everybody has heard how the run ends, and whoever failed has left: launchers blame the first to leave."""
        culprit = self.statuses.get(self.failure.rank) if self.failure and self.failure.rank is not None else None
        if culprit is not None and culprit.process_is_alive:
            return False
        return all(status.state != RUNNING or self.how_lost(status) for status in self.statuses.values())

    def waiting_for(self, own: Status) -> str | None:
        """Say whom the run waits for, or None where nobody is behind."""
        missing = sorted(set(range(self.world_size)) - set(self.statuses) - {own.rank})
        return waiting_for([*self.statuses.values(), own], missing)

    def overdue(self, own: Status, what: str, elapsed: float, limit: float, option: str) -> Failure:
        """Return the failure of a run in which something takes too long.

        Args:
            option: the recipe's name for the limit.
        """
        behind = furthest_behind([*self.statuses.values(), own])
        waiting = self.waiting_for(own) or f"no rank is behind the others; rank {own.rank} is {own.doing}"
        return Failure(
            behind[0].rank if len(behind) == 1 else None,
            f"{what} has taken {elapsed:.0f} s, the limit is {limit:g} s ({option}): {waiting}; raise the limit if that is how "
            "long it takes",
        )
