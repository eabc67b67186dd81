"""What torch.compile really did: counted, timed, explained, and refused when it was nothing."""

import time

import pytest
import torch
from torch import nn

from backends.base import CompileCache
from recipes import command_line
from recipes.base import RecipeError
from tests.fake_backend import FakeBackend
from tests.test_recipes import change
from training.compile import (
    CacheUse,
    CompileInactive,
    CompileWatch,
    cache_state,
    cache_state_of_all,
    compile_keywords,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def watch(active=True):
    return CompileWatch(active, CompileCache, lambda: (None, None))


def test_compile_time_is_that_of_the_first_call():
    """Case A17: a compiler that takes 0.2 s counts 0.2 s, though wrapping the module returns at once."""

    def slow_compiler(graph, inputs):
        time.sleep(0.2)
        return graph

    seen = watch()
    net = Net()
    net.compile(backend=slow_compiler, dynamic=False, fullgraph=True)
    assert seen.totals().compile_seconds == 0.0
    net(torch.ones(2, 4))
    (compilation,) = seen.observe(1)
    assert compilation.seconds >= 0.2
    assert compilation.seconds - compilation.trace_seconds >= 0.2
    assert compilation.cause == "first call" and compilation.direction == "forward" and "forward" in compilation.function
    assert seen.observe(2) == []
    seen.require_compiled()


def test_a_new_shape_is_a_late_compile_with_its_cause():
    """Case A18: seq_len changes at step 5."""
    seen = watch()
    net = Net()
    net.compile(backend="eager", dynamic=False, fullgraph=True)
    for step in range(1, 8):
        net(torch.ones(2 if step < 5 else 3, 4))
        seen.observe(step)
    report = seen.report()
    assert report["graphs"] == 2 and len(report["compilations"]) == 1
    (late,) = report["late_compiles"]
    assert late["step"] == 5 and late["seconds"] > 0
    assert "size mismatch at index 0. expected 2, actual 3" in late["cause"]
    assert report["late_compile_seconds"] == late["seconds"]


def test_graph_breaks_are_counted_with_their_reason():
    class Breaks(Net):
        def forward(self, x):
            y = self.linear(x)
            torch._dynamo.graph_break()
            return y.relu()

    seen = watch()
    net = Breaks()
    net.compile(backend="eager", dynamic=False)
    net(torch.ones(2, 4))
    seen.observe(1)
    breaks = seen.report()["graph_breaks"]
    assert sum(breaks.values()) == 1 and "graph_break" in next(iter(breaks))


def test_asking_for_compilation_and_getting_none_is_an_error():
    """Case E14: an allow-list, a stance or a variable that leaves the model uncompiled does not pass unnoticed."""
    seen = watch()
    net = Net()
    net.compile(backend="eager", dynamic=False)
    with torch.compiler.set_stance("force_eager"):
        net(torch.ones(2, 4))
    seen.observe(1)
    with pytest.raises(CompileInactive, match="nothing was compiled"):
        seen.require_compiled()


def test_eager_mode_is_not_watched_and_not_refused():
    seen = watch(active=False)
    assert seen.observe(1) == []
    seen.require_compiled()
    assert seen.totals().compile_seconds == 0.0
    assert seen.report()["graphs"] == 0


@pytest.mark.parametrize(
    "hits, misses, state",
    [(0, 3, "cold"), (3, 0, "warm"), (2, 1, "partial"), (None, 1, "unknown"), (1, None, "unknown"), (0, 0, None)],
)
def test_cache_state(hits, misses, state):
    assert cache_state(hits, misses) == state


def test_keywords_come_from_recipe_and_device():
    debug = command_line.load("debug")
    backend = FakeBackend()
    assert compile_keywords(debug, backend) is None
    compiled = change(debug, "run.mode", "compile")
    keywords = compile_keywords(compiled, backend)
    assert keywords["backend"] == backend.compile_backend
    assert keywords["dynamic"] is False and keywords["fullgraph"] is True
    named = compile_keywords(change(compiled, "compile.backend", "aot_eager"), backend)
    assert named["backend"] == "aot_eager"


def test_an_option_that_the_device_does_not_honour_is_refused():
    backend = FakeBackend()
    backend.compile_options = {"dynamic": (False,), "fullgraph": (True,)}
    recipe = change(change(command_line.load("debug"), "run.mode", "compile"), "compile.fullgraph", False)
    with pytest.raises(RecipeError, match=r"fullgraph.*got False.*allowed: True"):
        compile_keywords(recipe, backend)


@pytest.mark.parametrize(
    ("uses", "state"),
    [
        ([("a", 0, 3)], "cold"),
        ([("a", 3, 0)], "warm"),
        ([("a", 2, 1)], "partial"),
        ([("a", 0, 0)], None),
        ([("a", None, 3)], "unknown"),
        ([], None),
        # One rank compiles, the other finds what it has just written: that is cold.
        ([("a", 0, 3), ("a", 3, 0)], "cold"),
        ([("a", 1, 2), ("a", 2, 1)], "cold"),
        ([("a", 2, 1), ("a", 3, 0)], "partial"),
        ([("a", 3, 0), ("a", 3, 0)], "warm"),
        # B6: caches of their own, one of them filled before.
        ([("a", 3, 0), ("b", 0, 3)], "partial"),
        ([("a", 0, 3), ("b", 0, 3)], "cold"),
        ([("a", 3, 0), ("b", None, None)], "unknown"),
        # A rank that asks for nothing says nothing about the cache.
        ([("a", 0, 0), ("b", 0, 3)], "cold"),
    ],
)
def test_b6_the_state_in_which_all_ranks_found_their_caches(uses, state):
    assert cache_state_of_all([CacheUse(*use) for use in uses]) == state
