"""What is found in a step before it runs: graphs, and what a device that compiles would choke on, with file and line."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import MethodType

import pytest

from models import Family, load_family
from preflight import stage as stage_module
from preflight.inventory import Finding, Inventory, take_inventory
from preflight.stage import rehearsed_ranks
from preflight.stored import parse, take
from tests import hazards

TINY = ["qwen3_0_6b", "--tiny", "--training.dtype", "float32", "--parallel.ranks", "1"]
COMPILED = [*TINY, "--run.mode", "compile", "--parallel.activation_checkpointing", "none"]


def inventory(*arguments: str, **keywords) -> Inventory:
    recipe = parse(arguments)
    with rehearsed_ranks(recipe, recipe.parallel.ranks) as ranks:
        return take_inventory(recipe, ranks, **keywords)


def kinds(found: Inventory) -> set[str]:
    return {finding.kind for finding in found.findings}


def test_an_inventory_does_not_depend_on_the_run_or_the_rank():
    arguments = [*COMPILED, "--parallel.ranks", "4", "--parallel.tensor_parallel_degree", "2"]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        last = other.submit(take, parse(arguments), 3).result()
    first, again = take(parse(arguments)), take(parse(arguments))
    assert first == again
    assert set(first.inventory.distinct) == set(last.inventory.distinct)
    assert len(first.inventory.distinct) == 2


def test_eager_has_operators_and_no_graphs():
    found = inventory(*TINY)
    assert found.graphs == []
    assert "aten.mm.default(float32[64, 64], float32[64, 128])" in found.operators
    assert any(name.startswith("aten._foreach_") for name in found.operators), "the optimizer is one of them"
    assert set(inventory(*TINY, "--optimizer.lr", "0.5").operators) == set(found.operators)


def test_lengths_that_vary_compile_once_each():
    """Case B13: each length is a graph of its own, and its cause is in the inventory."""
    found = inventory(*COMPILED, seq_lens=(31, 32, 30))
    assert len(found.distinct) == 6
    assert found.graphs[-1].cause.endswith("expected 32, actual 30")
    (finding,) = [finding for finding in found.findings if finding.kind == "dynamic shape"]
    assert "is compiled 3 times: a shape or a constant changes between calls" in finding.text


@pytest.fixture
def with_feed_forward(monkeypatch: pytest.MonkeyPatch):
    """Give every block another feed-forward network."""

    def use(forward) -> None:
        family = load_family("qwen3")

        class Changed(family.Model):
            def __init__(self, config):
                super().__init__(config)
                for block in self.layers:
                    block.feed_forward.forward = MethodType(forward, block.feed_forward)

        monkeypatch.setattr(stage_module, "load_family", lambda name: Family(Changed, family.parallelize, family.adapter))
        monkeypatch.setattr("preflight.graphs._OURS", (str(hazards.__file__),))

    return use


@pytest.mark.parametrize(
    ("forward", "kind", "line"),
    [
        (hazards.every_second_element, "strided slice", "x[..., ::2]"),
        (hazards.doubles, "64-bit", "x.double()"),
        (hazards.asks_for_a_value, "host sync", "x.sum().item()"),
        (hazards.picks_by_value, "data-dependent shape", "x[x > 0]"),
    ],
)
def test_hazards_of_eager_mode_have_file_and_line(with_feed_forward, forward, kind: str, line: str):
    with_feed_forward(forward)
    (finding,) = [finding for finding in inventory(*TINY).findings if finding.kind == kind and finding.where][:1]
    assert line in finding.where and "hazards.py:" in finding.where


@pytest.mark.parametrize(
    ("forward", "kind", "line"),
    [
        (hazards.every_second_element, "strided slice", "x[..., ::2]"),
        (hazards.doubles, "64-bit", "x.double()"),
    ],
)
def test_hazards_of_compiled_graphs_have_file_and_line(with_feed_forward, forward, kind: str, line: str):
    with_feed_forward(forward)
    found = [finding for finding in inventory(*COMPILED).findings if finding.kind == kind and finding.where]
    assert found and line in found[0].where and "hazards.py:" in found[0].where, found


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_a_graph_break_is_found(with_feed_forward, kind: str):
    """Within selective checkpointing nothing is left to compile, and torch does not say where."""
    with_feed_forward(hazards.prints)
    found = inventory(*COMPILED, "--parallel.activation_checkpointing", kind)
    (finding,) = [finding for finding in found.findings if finding.kind == "graph break"]
    assert finding.text == "Failed to trace builtin operator"
    assert len(found.graphs) == (6 if kind == "none" else 0)


def test_a_recipe_without_hazards_has_only_its_token_ids():
    found = inventory(*COMPILED)
    assert kinds(found) == {"64-bit"}
    assert all(isinstance(finding, Finding) and finding.text == "int64 tensors" for finding in found.findings)
