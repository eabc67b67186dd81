"""Which change a new graph comes from, on inventories made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from preflight.against import compare, find_causes
from preflight.graphs import BACKWARD, FORWARD, Graph, Line
from preflight.inventory import Finding, Inventory
from preflight.stored import Stored


def graph(direction: str, *lines: str) -> Graph:
    where = "models/x.py:3 `x = a + b`"
    return Graph("0/0", direction, tuple(Line(line, where) for line in lines), "forward (models/x.py:1)", "first call")


OLD = Stored(
    recipe={"training.seq_len": "64", "optimizer.lr": "0.1", "parallel.ranks": "1"},
    ranks=1,
    settings={"version of torch": "2.13.0", "NEURON_CC_FLAGS": None, "LNC": "2"},
    sources={"models/x.py": "aa"},
    inventory=Inventory(
        [graph(FORWARD, "input %0: float32[64]", "%1 = add(%0): float32[64]"), graph(BACKWARD, "%0 = mul(): float32[64]")],
        {"aten.add(float32[64])": 2},
        [Finding("64-bit", None, "int64 tensors", 3)],
    ),
)
LONGER = replace(
    OLD,
    recipe={**OLD.recipe, "training.seq_len": "128"},
    inventory=Inventory([graph(FORWARD, "input %0: float32[128]", "%1 = add(%0): float32[128]"), OLD.inventory.graphs[1]], {}),
)


def compared(new: Stored, **keywords):
    comparison = compare(OLD, new)
    find_causes(comparison, OLD, new, **keywords)
    return comparison


def test_nothing_changed():
    assert compared(OLD).verdict == "nothing will recompile"
    assert compared(replace(OLD, recipe={**OLD.recipe, "optimizer.lr": "0.2"})).verdict == "nothing will recompile"


def test_one_field_is_the_cause():
    found = compared(LONGER)
    assert found.verdict == "1 of 2 graphs will be compiled again: training.seq_len: 64 -> 128"
    assert found.new[0].difference == "input %0: float32[64] -> input %0: float32[128]"
    assert found.new[0].where == "models/x.py:3 `x = a + b`"


def test_of_two_fields_the_one_that_matters_is_found_by_trying():
    both = replace(LONGER, recipe={**LONGER.recipe, "optimizer.lr": "0.2"})
    tried = []

    def with_field(name: str, value: str) -> Stored:
        tried.append((name, value))
        return LONGER if name == "training.seq_len" else OLD

    assert compared(both, with_field=with_field).causes == ["training.seq_len: 64 -> 128"]
    assert tried == [("training.seq_len", "128"), ("optimizer.lr", "0.2")]


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("version of torch", "2.14.0", "version of torch: 2.13.0 -> 2.14.0"),
        ("NEURON_CC_FLAGS", "-O2", "NEURON_CC_FLAGS: None -> -O2"),
        ("LNC", "1", "LNC: 2 -> 1"),
    ],
)
def test_another_environment_compiles_everything_and_is_named(setting: str, value: str, said: str):
    """Cases B22 and E8: a miss that only the environment explains is not silent."""
    found = compared(replace(OLD, settings={**OLD.settings, setting: value}))
    assert found.verdict.startswith("2 of 2 graphs and 1 eager operators will be compiled again")
    assert found.causes == [f"{said}, which is part of the cache's key"]


def test_an_edited_line_is_the_cause():
    edited = replace(LONGER, recipe=OLD.recipe, sources={"models/x.py": "bb"})
    edits = ["models/x.py:3 `x = a - b` -> `x = a + b`", "models/x.py:9 `pass` -> `return`"]
    assert compared(edited, edits=edits).causes == edits[:1]
    assert compared(edited).causes == ["an edit of models/x.py"], "without the older sources"


def test_an_inventory_is_read_as_it_was_written(tmp_path: Path):
    OLD.write(tmp_path / "inventory.json")
    assert Stored.read(tmp_path / "inventory.json") == OLD
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="not an inventory"):
        Stored.read(tmp_path / "other.json")
