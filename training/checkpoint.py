"""Saves a run's state: the loop waits while it is copied to the host, and a thread writes the copy.

Each rank writes what it holds. A save that fails costs nothing but itself: the state is in memory, older checkpoints stay, and
the run goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from recipes.base import Recipe
from training.checkpoint_files import CheckedWriter
from training.checkpoint_store import CheckpointError, CheckpointStore, Manifest
from training.record import RunFailed, package_versions
from training.resume import Resumed
from training.run_state import RunState, in_one_line
from training.strays import remove_strays
from training.weights import Adapter, export_weights

if TYPE_CHECKING:
    from training.data import PackedBatches
    from training.distributed import Ranks
    from training.journal import Journal


class SaveFailed(RunFailed):
    """The last checkpoint of a run could not be written."""


@dataclass(frozen=True)
class Save:
    """One save, for the record."""

    step: int
    waited_seconds: float
    """The loop stood still for this long."""
    seconds: float | None
    """From the loop's call until it was complete. None: it never was."""
    bytes: int | None
    """Of all ranks. None: it was not written."""
    error: str | None


class Checkpointer:
    """Saves one run's state. All ranks call the same methods in the same order.

    Args:
        store: where to.
        resumed: where the run went on from. None: it began at step 1.
        data: whose place is saved with the state.
        journal: takes the notes, and knows the newest loss.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: CheckpointStore,
        resumed: Resumed | None,
        state: RunState,
        ranks: Ranks,
        data: PackedBatches,
        journal: Journal,
    ):
        self.recipe, self.settings, self.store, self.resumed = recipe, recipe.checkpoint, store, resumed
        self.state, self.ranks, self.data, self.journal = state, ranks, data, journal
        self.notify = journal.console.note
        self.saves: list[Save] = []
        self._stager = DefaultStager(StagingOptions(state.backend.pin_memory, False, False, False))
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_step_back)
        self._running: tuple[Manifest, float, float, Future[None]] | None = None
        self._needed_bytes: int | None = None
        self._has_swept = False

    def due(self, step: int) -> bool:
        """Whether the recipe wants a checkpoint of this step."""
        every = self.settings.every_steps
        return every > 0 and (step % every == 0 or step == self.recipe.training.steps)

    @property
    def is_writing(self) -> bool:
        """Whether a thread competes with the loop."""
        return self._running is not None

    def longest(self) -> float | None:
        """Seconds of the slowest save so far. None: there was none."""
        return max((save.seconds for save in self.saves if save.seconds is not None), default=None)

    def save(self, step: int, *, last: bool = False) -> None:
        """Save the state after a step. When this returns it is complete only if saves are not asynchronous or it is the last.

        Raises:
            SaveFailed: if it is the last and failed, naming the file.
        """
        with self.ranks.watchdog.task("saving a checkpoint"):
            self._save(step, last)
        if last and self.saves[-1].error is not None:
            complete = self.ranks.from_main(self.store.complete_steps)
            newest = self.store.name(complete[0]) if complete else "none"
            raise SaveFailed(f"{self.saves[-1].error}; the newest complete checkpoint is {newest}")

    def _save(self, step: int, last: bool) -> None:
        began = time.perf_counter()
        self.settle()
        if (problem := self._lacks_room(step)) is not None:
            self._note(Save(step, time.perf_counter() - began, None, None, problem))
        else:
            manifest = self._manifest(step)
            staged = self._stager.stage(self.state.tensors())
            assert isinstance(staged, dict)
            written = self._thread.submit(self._write, staged, manifest)
            self._running = (manifest, began, time.perf_counter() - began, written)
            if last or not self.settings.asynchronous:
                self.settle(waits=True)

    def _manifest(self, step: int) -> Manifest:
        return Manifest(
            step=step,
            run=self.journal.record.folder.name,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            recipe=asdict(self.recipe),
            versions=package_versions(),
            world_size=self.ranks.world.size,
            layout=self.ranks.layout(self.recipe),
            tokens_per_step=self.recipe.tokens_per_step(self.ranks.world.size),
            data=self.data.state_dict(),
            loss=self.journal.last_loss,
        )

    def _write(self, staged: dict[str, Tensor], manifest: Manifest) -> None:
        """In the thread: write, mark as complete, and delete what that makes superfluous."""
        writer, group = CheckedWriter(self.store, manifest), self.state.group
        write_state(staged, storage_writer=writer, process_group=group, no_dist=group is None)
        if self.state.rank == 0:
            try:
                self.store.retire(self.settings.keep_last, self.settings.keep_every_steps)
                self._sweep()
            except OSError as error:  # the new one is complete all the same
                self.notify(f"warning: an old checkpoint could not be deleted: {in_one_line(error)}")

    def _sweep(self) -> None:
        """Once, and when this run has something of its own: clean up after those that were killed before it."""
        if not self._has_swept and self.ranks.world.is_main:
            self._has_swept = True
            remove_strays(self.journal.record.folder, self.recipe.name, self.store.url)

    def settle(self, *, waits: bool = False) -> None:
        """Wait for the save that is being written, if there is one, and write down how it went.

        Args:
            waits: whether the loop has stood still for the whole of it.
        """
        if self._running is None:
            return
        manifest, began, waited, written = self._running
        error = written.exception()
        self._running, seconds = None, time.perf_counter() - began
        if error is None:
            self._note(Save(manifest.step, seconds if waits else waited, seconds, self._needed_bytes, None))
        else:
            text = f"checkpoint of step {manifest.step} failed: {in_one_line(error)}"
            self._note(Save(manifest.step, seconds if waits else waited, None, None, text))

    def poll(self) -> None:
        """Write down the save that was being written, if it is over by now."""
        if self._running is not None and self._running[-1].done():
            self.settle()

    def _note(self, save: Save) -> None:
        self.saves.append(save)
        if save.error is not None:
            self.notify(f"warning: {save.error}; training goes on, older checkpoints stay")
        else:
            self.notify(f"checkpoint: {self.store.name(save.step)} in {save.seconds:.2f} s, waited {save.waited_seconds:.2f} s")

    def _lacks_room(self, step: int) -> str | None:
        """Say so if there is not the room for another checkpoint. The same on all ranks."""
        if self._needed_bytes is None:
            self._needed_bytes = sum(self.ranks.gather(self.state.bytes_to_write()))
        free = self.ranks.from_main(self.store.free_bytes)
        if free is None or free >= self._needed_bytes:
            return None
        return (
            f"checkpoint of step {step} not written: it takes {self._needed_bytes / 1e6:,.1f} MB and {self.store.url} has "
            f"{free / 1e6:,.1f} MB free; make room there or choose another checkpoint.folder"
        )

    def export(self, adapter: Adapter) -> None:
        """Write the weights as they are now as a Hugging Face folder inside the run's, with a card of how they came about."""
        folder = self.journal.record.folder / "checkpoints" / "hf"
        loss = self.journal.last_loss if self.resumed is None else self.journal.last_loss or self.resumed.manifest.loss
        with self.ranks.watchdog.task("the export of the weights"):
            export_weights(
                self.state.model,
                adapter,
                folder,
                self.data.tokenizer.save,
                step=self.recipe.training.steps,
                start=self.recipe.model.initial_weights,
                dtype=getattr(torch, self.settings.export_dtype),
                facts={
                    "recipe": self.recipe.name,
                    "run": self.journal.record.folder.name,
                    "tokens": f"{self.data.tokens_seen:,}",
                    "loss": "n/a" if loss is None else f"{loss:.4f}",
                },
                writes=self.ranks.world.is_main,
            )
        self.notify(f"weights: {folder}")

    def section(self) -> dict[str, Any]:
        """Return the section `checkpoints` of the run record."""
        return checkpoint_section(self.store, self.resumed, self.saves)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish what is being written, unless the ranks no longer answer each other."""
        if error is None or self.ranks.world.size == 1:
            self.settle()
        if error is None:
            self._sweep()
        self._thread.shutdown(wait=error is None)
        self._stager.close()


def _step_back() -> None:
    """Give this thread a low priority: on a CPU it takes its time from the steps. Not the lowest: then it is never done."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def checkpoint_section(store: CheckpointStore, resumed: Resumed | None, saves: Sequence[Save] = ()) -> dict[str, Any]:
    """Return the section `checkpoints` of the run record: where a run saves, what it went on from, what it saved."""
    return {
        "folder": store.url,
        "resumed_from": None if resumed is None else resumed.describe(),
        "saves": [asdict(save) for save in saves],
    }


def checkpoint_store(
    recipe: Recipe, run_folder: Path, resumed: Resumed | None, notify: Callable[[str], None]
) -> CheckpointStore:
    """Return where this run saves to: where the recipe says, or where the run that it resumes did.

    Raises:
        CheckpointError: if checkpoints of another history are there, which ours would mix with.
    """
    asked, own = recipe.checkpoint.folder, str(run_folder / "checkpoints")
    store = CheckpointStore(asked) if asked else resumed.store if resumed else CheckpointStore(own)
    later = [step for step in store.complete_steps() if resumed is None or step > resumed.manifest.step]
    if not later or (asked is None and resumed is None):
        return store
    if asked is None:  # gone back to an older one: what came after it is another history, and stays what it is
        notify(f"{store.name(later[0])} is newer than the checkpoint resumed from: this run saves to {own}")
        return CheckpointStore(own)
    raise CheckpointError(
        f"checkpoint.folder: {store.name(later[0])} is there already; go on from it with --resume, or choose another folder"
    )
