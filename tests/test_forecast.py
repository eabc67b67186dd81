"""How long the first step will take, from records written by hand, and the published break-even."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preflight import forecast
from preflight.choices import WORK
from preflight.forecast import COLD, WARM, advice, break_even, first_step, read_runs
from preflight.graphs import BACKWARD, FORWARD, Graph, Line

PUBLISHED_FIRST = {"eager": 184.6, "compile": 255.7}
PUBLISHED_STEADY = {"eager": 65_536 / 11_099, "compile": 65_536 / 14_156}


def graph(direction: str, operators: int, name: str = "a") -> Graph:
    return Graph("0/0", direction, tuple(Line(f"%{index} = {name}()") for index in range(operators)))


def write_run(
    folder: Path, number: int, seconds: float, *, operators: int = 100, state: str = "cold", host: str = "here", **more
):
    """Write the record of a run of which half a second is no compilation."""
    compiled = seconds - 0.5
    halves = [{"direction": direction, "seconds": share * compiled} for direction, share in ((FORWARD, 0.6), (BACKWARD, 0.4))]
    mode = more.get("mode", "compile")
    record = {
        "id": f"run{number}",
        "environment": {"device": "cpu", "software": {"host": host, "packages": {"torch": more.get("torch", "2.13.0")}}},
        "identity": {"recipe": {"model": {}, "training": dict.fromkeys(WORK)}},
        "compile": {"mode": mode, "compilations": halves if mode == "compile" else [], "cache": {"state": state}},
        "timing": {"first_step_seconds": seconds, "steady": {"seconds_per_step_median": 0.5}},
        "work": {"flops_per_token": {"torchtitan": 1e6}, "tokens_per_step": 1000, "world_size": 1},
    }
    (folder / f"run{number}").mkdir()
    (folder / f"run{number}" / "record.json").write_text(json.dumps(record))


def runs(folder: Path):
    return [run.with_graphs(GRAPHS) for run in read_runs(folder, "cpu", "here", {"torch": "2.13.0"})]


GRAPHS = [graph(FORWARD, 100), graph(BACKWARD, 100)]


def test_the_same_work_takes_what_it_took(tmp_path: Path):
    for number, seconds in enumerate((10.5, 12.5, 11.5)):
        write_run(tmp_path, number, seconds)
    said = first_step(GRAPHS, 1e9, runs(tmp_path), "compile", COLD)
    assert (said.seconds, said.low, said.high, said.runs) == (
        pytest.approx(11.5),
        pytest.approx(10.5),
        pytest.approx(12.5),
        3,
    )


def test_a_graph_costs_by_its_operators_and_once(tmp_path: Path):
    write_run(tmp_path, 0, 10.5)
    larger = [graph(FORWARD, 200), graph(BACKWARD, 100), graph(FORWARD, 200)]
    assert first_step(larger, 1e9, runs(tmp_path), "compile", COLD).seconds == pytest.approx(0.5 + 12 + 4)


def test_what_the_cache_has_costs_what_warm_runs_cost(tmp_path: Path):
    write_run(tmp_path, 0, 10.5)
    known = {GRAPHS[0].fingerprint}
    assert first_step(GRAPHS, 1e9, runs(tmp_path), "compile", COLD, known).seconds is None, "no warm run to tell from"
    assert first_step(GRAPHS, 1e9, runs(tmp_path), "compile", WARM).seconds is None
    write_run(tmp_path, 1, 1.5, state="warm")
    assert first_step(GRAPHS, 1e9, runs(tmp_path), "compile", WARM).seconds == pytest.approx(1.5)
    assert first_step(GRAPHS, 1e9, runs(tmp_path), "compile", COLD, known).seconds == pytest.approx(0.5 + 0.6 + 4)


def test_other_machines_versions_and_unfinished_runs_tell_nothing(tmp_path: Path):
    write_run(tmp_path, 0, 10.5, host="elsewhere")
    write_run(tmp_path, 1, 10.5, torch="2.12.0")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "record.json").write_text('{"status": "running"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_text("{")
    assert runs(tmp_path) == [] and runs(tmp_path / "nowhere") == []
    assert first_step(GRAPHS, 1e9, [], "compile", COLD) == forecast.Seconds(None, None, None, 0)


def test_the_published_break_even():
    found = break_even(PUBLISHED_FIRST, PUBLISHED_STEADY, 20, "published")
    assert found.step == 57
    assert (round(found.eager_seconds, 1), round(found.compiled_seconds, 1)) == (296.8, 343.7)
    found = break_even(PUBLISHED_FIRST, PUBLISHED_STEADY, 100, "published")
    assert (round(found.eager_seconds, 1), round(found.compiled_seconds, 1)) == (769.2, 714.0)
    assert advice(break_even(PUBLISHED_FIRST, PUBLISHED_STEADY, 40, "published"), 40).startswith(
        "40 steps planned: eager is ahead until step 57"
    )
    assert "compile is ahead from step 57" in advice(found, 100)


def test_compiling_that_never_pays_and_that_pays_at_once():
    slower = {"eager": 1.0, "compile": 1.0}
    assert break_even({"eager": 1, "compile": 2}, slower, 5, "").step is None
    assert "never pays" in advice(break_even({"eager": 1, "compile": 2}, slower, 5, ""), 5)
    assert break_even({"eager": 2, "compile": 1}, slower, 5, "").step == 1
    assert break_even({"eager": 1, "compile": 3}, {"eager": 2, "compile": 1}, 5, "").step == 4  # at the third they are level
