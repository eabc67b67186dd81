"""Kills runs at random moments, over and over, and holds what they leave against a run that was left in peace.

    python -m tests.crash_campaign --kills 200 --seed 0

Each story is one run that is killed and started again until it has been killed often enough, or has finished. Every start must
go on from the newest checkpoint that is complete. Every step that any of them recorded, and all that is saved at the end, must
be what the undisturbed run has, bit for bit. Every record must be readable, and nothing half written may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from tests.crash_worker import PLACES
from tests.durable import FIELDS
from tests.ranks import Processes
from tests.test_train import SCHEMA, TINY
from training.checkpoint_store import CheckpointStore

STEPS, EVERY = 12, 3
SECONDS = 120
HOW = ("before", "after", "announce", "announce")


@dataclass(frozen=True)
class Kind:
    """What is killed: how many ranks, and how they save."""

    world_size: int
    asynchronous: bool

    @property
    def arguments(self) -> list[str]:
        return [
            *TINY,
            *("--training.steps", str(STEPS), "--training.global_batch_size", "4", "--run.log_every", "1"),
            *("--checkpoint.every_steps", str(EVERY), "--checkpoint.keep_last", "2", "--checkpoint.export"),
            f"--checkpoint.{'' if self.asynchronous else 'no_'}asynchronous",
        ]

    def __str__(self) -> str:
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}, {'' if self.asynchronous else 'not '}asynchronous"


KINDS = [Kind(ranks, asynchronous) for ranks in (1, 2) for asynchronous in (True, False)]


@dataclass(frozen=True)
class Truth:
    """What the undisturbed run has."""

    steps: dict[int, dict[str, Any]]
    state: dict[str, str]
    weights: bytes


@dataclass
class Counts:
    """What the campaign has seen."""

    kills: Counter[str] = field(default_factory=Counter)
    kills_of: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    resumed_at: Counter[int] = field(default_factory=Counter)
    unfinished_skipped: int = 0
    finished_stories: int = 0
    records: int = 0
    faults: list[str] = field(default_factory=list)


def launch(kind: Kind, folder: Path, place: str, count: int, how: str) -> Processes:
    command = ["-m", "tests.crash_worker", place, str(count), how, *kind.arguments]
    return Processes([*command, "--run.output_dir", str(folder), "--resume", "auto"], kind.world_size)


def truth(kind: Kind, folder: Path) -> Truth:
    """Train once in peace."""
    with launch(kind, folder, "step", 10**6, "before") as ranks:
        finished = ranks.finish(SECONDS)
    assert [code for code, _ in finished] == [0] * kind.world_size, finished
    (run,) = folder.glob("*/record.json")
    return Truth(steps_of(run.parent), state_of(run.parent), weights_of(run.parent))


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the recorded steps of one run by number; each line must be whole."""
    path = folder / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: {name: line[name] for name in FIELDS} for line in lines}


def state_of(folder: Path) -> dict[str, str]:
    """Return the checksums of all that was saved at the last step."""
    store = CheckpointStore(json.loads((folder / "record.json").read_text())["checkpoints"]["folder"])
    manifest = store.read(STEPS)
    assert manifest is not None
    store.verify(STEPS, manifest)
    return {name: file["sha256"] for name, file in manifest.files.items() if name.endswith(".distcp")}


def weights_of(folder: Path) -> bytes:
    """Return the exported tensors without their header, which names the run."""
    data = (folder / "checkpoints" / "hf" / "model.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def newest_complete(folder: Path) -> int:
    """Return the step of the newest checkpoint that is complete in any run of a story. 0: there is none."""
    newest = 0
    for checkpoints in folder.glob("*/checkpoints"):
        store = CheckpointStore(str(checkpoints))
        for manifest in store.candidates(lambda note: None):
            store.verify(manifest.step, manifest)
            newest = max(newest, manifest.step)
            break
    return newest


def strays(folder: Path) -> list[str]:
    """Return what should not be there when all is over."""
    found = [path for path in folder.rglob("*") if path.name.endswith((".partial", ".tmp"))]
    found += [path for path in folder.glob("*/checkpoints/step-*") if not (path / "complete.json").exists()]
    return [str(path.relative_to(folder)) for path in found]


def story(kind: Kind, folder: Path, expected: Truth, kills: int, chance: random.Random, counts: Counts, say=print) -> int:
    """Kill one run up to `kills` times and let it finish. Returns how often it was killed."""
    killed = 0
    while True:
        in_peace = killed == kills
        place = chance.choice(["start", *PLACES])
        count, how = chance.randint(1, 14 if place in ("step", "write", "record") else 3), chance.choice(HOW)
        if in_peace:
            place, count, how = "step", 10**6, "before"
        before = newest_complete(folder)
        died, output = attempt(kind, folder, place, count, how, chance)
        counts.starts += 1
        counts.unfinished_skipped += output.count("was never finished")
        check_start(folder, before, output, counts)
        if not died:
            break
        killed += 1
        counts.kills[f"{place}, {how}"] += 1
        counts.kills_of[str(kind)] += 1
        say(f"killed in {place} ({how} {count}), {kind}: had step {before}, has step {newest_complete(folder)}")
    check_end(kind, folder, expected, counts)
    return killed


def attempt(kind: Kind, folder: Path, place: str, count: int, how: str, chance: random.Random) -> tuple[bool, str]:
    """Start the run and kill it, or a rank of it, at that place. Returns whether it died, and rank 0's output."""
    with launch(kind, folder, place, count, how) as ranks:
        victim = ranks.processes[chance.randrange(kind.world_size)]
        wait = chance.choice([0.0, chance.uniform(0, 0.01), chance.uniform(0, 0.3), chance.uniform(0, 3.0)])
        ends = time.monotonic() + SECONDS
        announced = False
        while time.monotonic() < ends and all(process.returncode is None for process in ranks.processes):
            if how == "announce" and not announced and "DEADLY" in victim.output:
                announced = True
                time.sleep(wait)
                victim.kill()
            time.sleep(0.001)
        died = -signal.SIGKILL in [process.returncode for process in ranks.processes]
        # Else the others find out by themselves, which they can once they have met: before, only the launcher sees it.
        if died and (place == "start" or chance.random() < 0.7):
            time.sleep(chance.uniform(0, 0.05))
            for process in ranks.processes:
                process.kill()
        finished = ranks.finish(SECONDS)
    codes = [code for code, _ in finished]
    assert -signal.SIGKILL in codes or not any(codes), f"{place} {how}: nobody was killed, and yet: {finished}"
    return -signal.SIGKILL in codes, finished[0][1]


def check_start(folder: Path, before: int, output: str, counts: Counts) -> None:
    """The newest run must have gone on from the newest complete checkpoint, if it came so far as to say."""
    runs = sorted(folder.glob("*/record.json"))
    if not runs:
        return
    resumed = json.loads(runs[-1].read_text())["checkpoints"]["resumed_from"]
    if resumed is not None:
        counts.resumed_at[resumed["step"]] += 1
    if f"run     {runs[-1].parent}" in output and (resumed["step"] if resumed else 0) != before:
        counts.faults.append(f"{runs[-1].parent.name} went on from {resumed}, the newest complete one was of step {before}")


def check_end(kind: Kind, folder: Path, expected: Truth, counts: Counts) -> None:
    """Hold all that a story has left against the undisturbed run."""
    counts.finished_stories += 1
    records = sorted(folder.glob("*/record.json"))
    steps: dict[int, dict[str, Any]] = {}
    for path in records:
        counts.records += 1
        record = json.loads(path.read_text())
        jsonschema.validate(record, SCHEMA)
        for number, step in steps_of(path.parent).items():
            steps[number] = step
            if step != expected.steps[number]:
                counts.faults.append(f"{path.parent.name}, step {number}: {step}, undisturbed: {expected.steps[number]}")
    folders = [path for path in folder.iterdir() if path.is_dir()]
    if len(folders) != len(records):
        counts.faults.append(f"{len(folders)} runs, {len(records)} records")
    if sorted(steps) != [*range(1, STEPS + 1)]:
        counts.faults.append(f"steps in the ledger: {sorted(steps)}")
    if (status := json.loads(records[-1].read_text())["status"]) != "finished":
        counts.faults.append(f"the last run is {status}")
    if state_of(records[-1].parent) != expected.state:
        counts.faults.append(f"{kind}: the saved state differs")
    if weights_of(records[-1].parent) != expected.weights:
        counts.faults.append(f"{kind}: the exported weights differ")
    if left := strays(folder):
        counts.faults.append(f"left behind: {left}")


def campaign(kills: int, seed: int, kinds: list[Kind], say=print, kills_in_a_story: int = 10) -> Counts:
    """Tell stories until there were that many kills."""
    counts, chance = Counts(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="firststep-crash-") as place:
        truths = {kind: truth(kind, Path(place, f"truth {number}")) for number, kind in enumerate(kinds)}
        number = 0
        while (done := sum(counts.kills.values())) < kills:
            kind, number = kinds[number % len(kinds)], number + 1
            folder = Path(place, f"story {number}")
            folder.mkdir()
            try:
                story(kind, folder, truths[kind], min(kills_in_a_story, kills - done), chance, counts, say)
            except (AssertionError, OSError, ValueError, KeyError) as error:  # what else is wrong is wanted too
                counts.faults.append(f"{kind}: {type(error).__name__}: {error}")
                say(counts.faults[-1])
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run the long form and print what it has counted as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    counts = campaign(
        options.kills, options.seed, KINDS, lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)
    )
    print(json.dumps(vars(counts), indent=1))
    return 1 if counts.faults else 0


if __name__ == "__main__":
    sys.exit(main())
