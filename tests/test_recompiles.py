"""What preflight says will compile is what the stand-in's compiler is asked for: how many graphs, and which are new after an edit."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from preflight.against import compare, find_causes
from preflight.stored import ROOT, Stored, parse, take
from preflight.trees import take_in
from tests import simulated_neuron
from tests.ranks import Processes, free_port
from training.snapshot import source_files

BASE = ["qwen3_8b_trn2", "--tiny", "--run.mode", "compile", "--training.dtype", "float32"]
BASE += ["--training.steps", "1", "--optimizer.warmup_steps", "0", "--run.no_tensorboard"]
BASE += ["--parallel.activation_checkpointing", "none"]


def mesh(ranks: int, tensor: int) -> list[str]:
    return ["--parallel.ranks", str(ranks), "--parallel.tensor_parallel_degree", str(tensor)]


def really(folder: Path, plans: list[list[str]], world_size: int = 1, root: Path = ROOT) -> list[dict]:
    """Train on the stand-in, one run after the other with one cache, and return what each compiled."""
    runs = [
        {"arguments": [*plan, "--run.device", "neuron", "--run.output_dir", str(folder / "runs")], "port": free_port()}
        for plan in plans
    ]
    with Processes(["-m", "tests.edit_worker", json.dumps(runs)], world_size, simulated_neuron.environment(folder), root=root) as ranks:
        finished = ranks.finish(240)
    for code, output in finished:
        assert code == 0, output[-3000:]
    found = [json.loads(line[4:]) for line in finished[0][1].splitlines() if line.startswith("RUN ")]
    assert [run["code"] for run in found] == [0] * len(plans), finished[0][1][-3000:]
    return found


def directions(stored: Stored) -> Counter[str]:
    return Counter({"forward": "fwd", "backward": "bwd"}[graph.direction] for graph in stored.inventory.distinct.values())


COUNTED = {
    "by block": [],
    "the whole model": ["--compile.region", "model"],
    "no deeper": ["--model.num_layers", "5"],
    "accumulation": ["--training.global_batch_size", "4", "--training.local_batch_size", "1"],
    "validation": ["--validation.every_steps", "1"],
    "selective": ["--parallel.activation_checkpointing", "selective"],
    "full": ["--parallel.activation_checkpointing", "full"],
}


def test_as_many_graphs_as_are_compiled(tmp_path: Path):
    plans = [[*BASE, *mesh(1, 1), *extra] for extra in COUNTED.values()]
    for name, plan, run in zip(COUNTED, plans, really(tmp_path, plans), strict=True):
        stored = take(parse(plan))
        compiled = Counter(direction for _, direction in run["compiled"])
        assert Counter({"forward": "fwd", "backward": "bwd"}[g.direction] for g in stored.inventory.graphs) == compiled, name
        assert len(stored.inventory.distinct) == len({key for key, _ in run["compiled"]}), name


FIELDS = {
    "learning rate": ["--optimizer.lr", "0.01"],
    "depth": ["--model.num_layers", "4"],
    "width": ["--model.ffn_dim", "256"],
    "vocabulary": ["--model.vocab_size", "8192"],
    "batch": ["--training.local_batch_size", "2"],
    "seq_len": ["--training.seq_len", "128"],
    "dtype": ["--training.dtype", "bfloat16"],
    "selective": ["--parallel.activation_checkpointing", "selective"],
    "full": ["--parallel.activation_checkpointing", "full"],
    "isolated documents": ["--data.isolate_documents"],
    "region": ["--compile.region", "model"],
}


def test_new_graphs_after_an_edit_of_a_field(tmp_path: Path):
    """Cases B22 and B23 ask why; this asks which."""
    plans = [[*BASE, *mesh(1, 1), *extra] for extra in ([], *FIELDS.values())]
    base = take(parse(plans[0]))
    known = set(base.inventory.distinct)
    for name, plan, run in zip(("base", *FIELDS), plans, really(tmp_path, plans), strict=True):
        stored = take(parse(plan))
        new = set(stored.inventory.distinct) - known if name != "base" else known
        assert len(new) == len(run["new"]), name
        known |= new
