"""Short runs that are saved and resumed, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch

import train
from tests.test_train import SCHEMA, TINY
from training.checkpoint_store import CheckpointStore, Manifest

FIELDS = ("step", "loss", "grad_norm", "lr", "tokens", "valid_tokens")


@dataclass(frozen=True)
class Ended:
    """One run that has ended."""

    code: int
    folder: Path
    record: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.record["checkpoints"]["folder"])

    def at(self, step: int) -> str:
        return self.store.folder(step)

    def manifest(self, step: int) -> Manifest:
        manifest = self.store.read(step)
        assert manifest is not None
        return manifest

    def state(self, step: int) -> str:
        """Checksum over everything that one process saved at a step: parameters, optimizer and random numbers."""
        return self.manifest(step).files["__0_0.distcp"]["sha256"]


def ended(code: int, folder: Path) -> Ended:
    """Read what a run left in its folder."""
    record = json.loads((folder / "record.json").read_text())
    jsonschema.validate(record, SCHEMA)
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return Ended(code, folder, record, [{name: json.loads(line)[name] for name in FIELDS} for line in lines])


def run(folder: Path, *flags: str, steps: int = 20) -> Ended:
    """Train in this process. The folder may hold earlier runs."""
    torch._dynamo.reset()
    before = set(folder.glob("*/record.json"))
    code = train.main([*TINY, "--training.steps", str(steps), "--run.output_dir", str(folder), *flags])
    (new,) = set(folder.glob("*/record.json")) - before
    return ended(code, new.parent)


def refused(capsys, folder: Path, *flags: str, steps: int = 20) -> str:
    """Return the one line with which a run is refused before it writes anything."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert train.main([*TINY, "--training.steps", str(steps), "--run.output_dir", str(folder), *flags]) == 2
    assert sorted(folder.rglob("*")) == before
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line
