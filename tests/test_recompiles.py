"""What preflight says will compile is what the stand-in's compiler is asked for: how many graphs, and which are new."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from preflight.against import compare, find_causes
from preflight.stored import ROOT, Stored, parse, take
from preflight.trees import Older, take_in
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
    environment = simulated_neuron.environment(folder)
    with Processes(["-m", "tests.edit_worker", json.dumps(runs)], world_size, environment, root=root) as ranks:
        finished = ranks.finish(240)
    for code, output in finished:
        assert code == 0, output[-3000:]
    found = [json.loads(line[4:]) for line in finished[0][1].splitlines() if line.startswith("RUN ")]
    assert [run["code"] for run in found] == [0] * len(plans), finished[0][1][-3000:]
    return found


FIELDS = {
    # in this order, with one cache: what each adds to those before it
    "as it is": [],
    "accumulation": ["--training.global_batch_size", "4"],
    "validation": ["--validation.every_steps", "1"],
    "learning rate": ["--optimizer.lr", "0.01"],
    "depth": ["--model.num_layers", "4"],
    "full": ["--parallel.activation_checkpointing", "full"],
    "width": ["--model.ffn_dim", "256"],
    "batch": ["--training.local_batch_size", "2"],
    "seq_len": ["--training.seq_len", "128"],
    "dtype": ["--training.dtype", "bfloat16"],
    "selective": ["--parallel.activation_checkpointing", "selective"],
    "the whole model": ["--compile.region", "model"],
}


def test_graphs_after_an_edit_of_a_field(tmp_path: Path):
    """As many as are compiled, as many different ones, and as many new ones as the cache misses."""
    plans = [[*BASE, *mesh(1, 1), *extra] for extra in FIELDS.values()]
    known, added = set[str](), dict[str, int]()
    for name, plan, run in zip(FIELDS, plans, really(tmp_path, plans), strict=True):
        inventory = take(parse(plan)).inventory
        compiled = Counter(direction for _, direction in run["compiled"])
        assert Counter({"forward": "fwd", "backward": "bwd"}[graph.direction] for graph in inventory.graphs) == compiled, name
        assert len(inventory.distinct) == len({key for key, _ in run["compiled"]}), name
        new = set(inventory.distinct) - known
        assert len(new) == len(run["new"]), name
        known |= new
        added[name] = len(new)
    reused = ("accumulation", "validation", "learning rate", "depth", "full")
    assert added == {name: 0 if name in reused else 2 for name in FIELDS}


SOURCES = {
    # name: file, text, its replacement
    "comment": ("models/qwen3/model.py", "class Block(", "# A comment above the block.\nclass Block("),
    "rope base": ("models/qwen3/config.py", "rope_theta: float = 1_000_000.0", "rope_theta: float = 10_000.0"),
    "heads": ("models/qwen3/config.py", "num_heads=8, num_kv_heads=4", "num_heads=16, num_kv_heads=4"),
    "place of a norm": (
        "models/qwen3/model.py",
        "return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))",
        "return x_BTD + self.ffn_norm(self.feed_forward(x_BTD))",
    ),
    "two kinds of blocks": (
        "models/qwen3/model.py",
        "Block(config) for _ in range(config.num_layers)",
        "Block(__import__('dataclasses').replace(config, norm_eps=10.0 ** -(6 - n % 2))) for n in range(config.num_layers)",
    ),
}


NEW = {"comment": 0, "rope base": 0, "heads": 2, "place of a norm": 2, "two kinds of blocks": 1}
"""Graphs that each of them adds. Blocks that differ in a norm's eps differ in the forward graph only (case B23)."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stored]:
    """A cache with the graphs of the recipe as it is, and its inventory."""
    folder = tmp_path_factory.mktemp("base")
    really(folder, [[*BASE, *mesh(1, 1)]])
    return folder, take(parse([*BASE, *mesh(1, 1)]))


@pytest.mark.parametrize("name", SOURCES)
def test_new_graphs_after_an_edit_of_the_source(name: str, base: tuple[Path, Stored], tmp_path: Path):
    file, text, replacement = SOURCES[name]
    folder, old = base
    tree = tmp_path / "tree"
    for path in (*source_files(ROOT), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tests/simulated_neuron/csrc").iterdir()):
        (tree / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tree / path.relative_to(ROOT))
    source = (tree / file).read_text()
    assert source.count(text) == 1
    (tree / file).write_text(source.replace(text, replacement))
    shutil.copytree(folder / "neff_cache", tmp_path / "neff_cache")
    (run,) = really(tmp_path, [[*BASE, *mesh(1, 1)]], root=tree)
    new = take_in(tree, [*BASE, *mesh(1, 1)])
    comparison = compare(old, new)
    find_causes(comparison, old, new, edits=Older("base", old, ROOT, ()).edits(tree, comparison.changed_sources))
    assert len(comparison.new) == len(run["new"]) == NEW[name]
    assert len(new.inventory.graphs) == len(run["compiled"])
    assert comparison.changed_sources == [file]
    if NEW[name]:
        (cause,) = comparison.causes
        assert cause.startswith(f"{file}:") and text.splitlines()[0] in cause and "->" in cause
    else:
        assert comparison.verdict == "nothing will recompile"


@pytest.mark.distributed
def test_new_graphs_on_another_mesh(tmp_path: Path):
    copied = ["--parallel.data_parallel_wrapper", "ddp"]
    plans = [[*BASE, *mesh(2, 1)], [*BASE, *mesh(2, 2)], [*BASE, *mesh(2, 1), *copied]]
    known = set[str]()
    for plan, run in zip(plans, really(tmp_path, plans, world_size=2), strict=True):
        new = set(take(parse(plan)).inventory.distinct) - known
        known |= new
        assert len(new) == len(run["new"]), plan
