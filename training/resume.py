"""Which checkpoint a run goes on from, and whether it is the same run that goes on. Torch-free.

A run that resumes is a run of its own, with its own record: its start and its first step were waited and paid for again. It
writes its checkpoints to where those of the run before it are, so that old ones are retired across restarts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.base import Recipe
from training.checkpoint_store import MARKER, CheckpointError, CheckpointStore, Damaged, Manifest
from training.world import launch_id, launcher_began

if TYPE_CHECKING:
    from training.distributed import Ranks

LATEST, AUTO = "latest", "auto"
EXACTLY = "asked for by path"
FREE = (
    "model.initial_weights",
    "validation.",
    "parallel.",
    "comm.",
    "checkpoint.",
    "health.",
    "run.budget_minutes",
    "run.chip",
    "run.log_every",
    "run.output_dir",
    "run.price_per_hour",
    "run.price_source",
    "run.profile",
    "run.stop_file",
    "run.tensorboard",
    "run.tracker",
    "run.tracker_project",
    "training.local_batch_size",
    "training.global_batch_size",
)
"""Fields, or sections, that may change: they alter what is watched, not what is computed. Batch sizes and layout may, because
tokens per step are compared instead."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    store: CheckpointStore
    manifest: Manifest
    why: str
    """How it was chosen."""

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {
            "checkpoint": self.store.name(self.manifest.step),
            "run": self.manifest.run,
            "step": self.manifest.step,
            "tokens_seen": self.manifest.data["seen"]["tokens_seen"],
            "world_size": self.manifest.world_size,
            "why": self.why,
        }

    def damage(self, share: int, shares: int) -> str | None:
        """Read a share of the files whole and say what is wrong with them. None: nothing."""
        try:
            self.store.verify(self.manifest.step, self.manifest, share, shares)
        except Damaged as error:
            return str(error)
        return None


def resume_point(recipe: Recipe, ranks: Ranks, notify: Callable[[str], None]) -> Resumed | None:
    """Return the checkpoint that all ranks go on from: the newest whose files are what they were. None: a new run.

    Raises:
        CheckpointError: if one was asked for and there is none, if that one is damaged, or if it is of another run.
    """
    began = None
    if _restarts():  # the launch is as old as its oldest launcher: one that has taken the place of another is younger
        began = min((began for began in ranks.gather(launcher_began()) if began is not None), default=None)
    search = candidates(recipe, notify, began)
    while (found := ranks.from_main(lambda: next(search, None))) is not None:
        damages = ranks.gather(found.damage(ranks.world.rank, ranks.world.size))
        damage = next((damage for damage in damages if damage is not None), None)
        if damage is None:
            require_same_run(recipe, ranks.world.size, found.manifest)
            return found
        if found.why == EXACTLY:
            raise CheckpointError(f"checkpoint.resume: {damage}; name another one, or --resume for the newest complete one")
        found.store.damaged[found.manifest.step] = damage
        notify(f"checkpoint skipped: {damage}")
    if recipe.checkpoint.resume == LATEST:
        place = recipe.checkpoint.folder or recipe.run.output_dir
        raise CheckpointError(
            f"checkpoint.resume: no complete checkpoint of {recipe.name} in {place}; "
            "name one with --resume PATH, begin at step 1 with --resume auto, or leave --resume out"
        )
    if recipe.checkpoint.resume is not None or _restarts():
        notify("there is no complete checkpoint to go on from: beginning at step 1")
    return None


def candidates(recipe: Recipe, notify: Callable[[str], None], began: float | None = None) -> Iterator[Resumed]:
    """Yield the checkpoints that a run may go on from, best first. Their files are there; what is in them was not read yet.

    Args:
        began: when this launch did, in seconds since the epoch: after a restart only its own runs count. None: unknown.

    Raises:
        CheckpointError: if a path was asked for and there is nothing complete.
    """
    asked, restarts = recipe.checkpoint.resume, _restarts()
    if restarts:
        yield from _newest(recipe, partial(_is_of_this_launch, began), f"restart {restarts} of the launcher", notify)
    if asked in (LATEST, AUTO):
        yield from _newest(recipe, lambda record: True, "newest of the recipe", notify)
    elif asked is not None:
        yield Resumed(*_at(asked), EXACTLY)


def _newest(
    recipe: Recipe, mine: Callable[[Mapping[str, Any]], bool], why: str, notify: Callable[[str], None]
) -> Iterator[Resumed]:
    for store in _stores(recipe, mine):
        for manifest in store.candidates(notify):
            yield Resumed(store, manifest, why)


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _at(place: str) -> tuple[CheckpointStore, Manifest]:
    """Return the checkpoint that a path names: of one step, or the newest of a run or of a folder of checkpoints."""
    place = place.rstrip("/")
    parent, _, name = place.rpartition("/")
    if name.startswith("step-") and name[5:].isdigit():
        store, step = CheckpointStore(parent or "."), int(name[5:])
        manifest = store.read(step)
        if manifest is None:
            there = f"was never finished (it has no {MARKER})" if step in store.steps() else "does not exist"
            raise CheckpointError(f"checkpoint.resume: {place} {there}; complete there: {_names(store)}")
        return store, manifest
    for folder in (place, f"{place}/checkpoints"):
        store = CheckpointStore(folder)
        for step in store.complete_steps():
            if (manifest := store.read(step)) is not None:
                return store, manifest
    raise CheckpointError(
        f"checkpoint.resume: got {place!r}, which holds no complete checkpoint; allowed: latest, auto, a run's folder, its "
        "checkpoints folder, or one step-... folder in it"
    )


def _names(store: CheckpointStore) -> str:
    return ", ".join(store.name(step) for step in store.complete_steps()) or "none"


def _is_of_this_launch(began: float | None, record: Mapping[str, Any]) -> bool:
    """Whether a run was started by the launcher that has started this one."""
    started = datetime.fromisoformat(record["started_utc"]).timestamp()
    return record["identity"]["launch"] == launch_id() and (began is None or started >= math.floor(began))


def _stores(recipe: Recipe, mine: Callable[[Mapping[str, Any]], bool]) -> Iterator[CheckpointStore]:
    """Yield where checkpoints of this recipe may be, newest run first.

    Args:
        mine: whether a record is of a run that may be gone on from.
    """
    if recipe.checkpoint.folder is not None:
        yield CheckpointStore(recipe.checkpoint.folder)
        return
    seen = set()
    for path in sorted(Path(recipe.run.output_dir).glob("*/record.json"), reverse=True):  # names begin with the time
        try:
            record = json.loads(path.read_text())
            saved = record.get("checkpoints") or {}
            if record["identity"]["recipe"]["name"] != recipe.name or not mine(record):
                continue
        except (OSError, ValueError, KeyError, TypeError):  # not ours, or half a record of an old version
            continue
        own = str(path.parent / "checkpoints")  # where the run is now, if it was moved or copied
        folder = own if CheckpointStore(own).steps() else saved.get("folder")
        if folder and folder not in seen:
            seen.add(folder)
            yield CheckpointStore(folder)


def require_same_run(recipe: Recipe, world_size: int, manifest: Manifest) -> None:
    """Refuse to go on with another run than the one that was saved.

    Raises:
        CheckpointError: naming every field that differs, with both values.
    """
    allowed = recipe.checkpoint.allow_change
    now, saved = _fields(asdict(recipe)), _fields(manifest.recipe)
    unknown = [name for name in allowed if name not in now]
    if unknown:
        raise CheckpointError(
            f"--allow-change: got {', '.join(unknown)}, which is no field; see `python train.py {recipe.name} --help`"
        )
    problems = [
        f"{name} was {saved.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(now.keys() | saved.keys())
        if not name.startswith(FREE) and name not in allowed and now.get(name) != saved.get(name)
    ]
    tokens = recipe.tokens_per_step(world_size)
    if tokens != manifest.tokens_per_step and "training.global_batch_size" not in allowed:
        samples = manifest.tokens_per_step // recipe.training.seq_len
        problems.append(
            f"tokens per step were {manifest.tokens_per_step:,} (on {manifest.world_size} ranks), are {tokens:,} (on "
            f"{world_size}); set training.global_batch_size to {samples}, or pass --allow-change training.global_batch_size"
        )
    if problems:
        raise CheckpointError(
            f"checkpoint.resume: this is not the run that was saved at step {manifest.step}: {'; '.join(problems)}. Use the "
            "same recipe, or pass --allow-change FIELD for each field that is meant to change"
        )


def _fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return section.field of every field; lists and tuples compare as JSON has them."""
    flat = {"name": recipe["name"]}
    for section, values in recipe.items():
        if isinstance(values, Mapping) and section != "published":
            flat |= {f"{section}.{name}": list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return flat
