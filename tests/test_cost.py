"""What results cost: failed, killed and removed attempts included; and that nothing is removed that somebody needs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ledger.command_line import main
from ledger.cost import Attempt, bills
from ledger.prices import price_of, prices
from ledger.remove import attempts
from ledger.runs import read_run
from recipes.debug import RECIPE
from training.record import RunRecord
from training.strays import own_process

STARTED = "2026-12-01T10:00:00+00:00"


def run(folder: Path, number: int, status: str = "finished", steps: int = 0, **sections: Any) -> str:
    """Write the record of a run that began at STARTED and recorded a step each minute; return its id."""
    name = f"20261201-10{number:02}00-debug-{number:06x}"
    (folder / name).mkdir(parents=True)
    record = {
        "schema_version": 1,
        "id": name,
        "status": status,
        "started_utc": STARTED,
        "identity": {"recipe": {"name": "debug"}, "process": {**own_process(), "started": 1}},
        "work": {"tokens_per_step": 1000, "parameters": 5},
        **sections,
    }
    (folder / name / "record.json").write_text(json.dumps(record))
    lines = [{"step": step, "written_utc": f"2026-12-01T10:{step:02}:00.000+00:00"} for step in range(1, steps + 1)]
    (folder / name / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


def priced(hours: float) -> dict[str, Any]:
    return {"cost": {"hours": hours, "price_per_hour": 10.0, "cost": 10 * hours}}


def compiled(seconds: float, cache: str) -> dict[str, Any]:
    return {"compile": {"compile_seconds": seconds, "mode": "compile", "cache": {"state": cache}}}


def test_every_attempt_counts(tmp_path: Path):
    failed = run(tmp_path, 0, "failed", 2, **priced(0.5))
    killed = run(tmp_path, 1, "running", 30, identity={"recipe": {"name": "debug", "run": {"price_per_hour": 10.0}}} | GONE)
    first = run(tmp_path, 2, "finished", 50, **priced(2.0), timing={"steady": {"tokens_per_second": 5.0}})
    run(tmp_path, 3, "interrupted", 9, **priced(0.25))
    (bill,) = bills(attempts(tmp_path))
    assert bill.states == {"failed": 1, "killed": 1, "finished": 1, "interrupted": 1}
    by_id = {attempt.id: attempt for attempt in bill.attempts}
    assert (by_id[killed].hours, by_id[killed].hours_at_least) == (0.5, True), "until the last line that it wrote"
    assert (by_id[failed].hours, by_id[failed].hours_at_least) == (0.5, False)
    assert bill.hours == 3.25 and bill.hours_at_least and bill.cost == 32.5
    assert bill.result_tokens == 50_000 and bill.cost_per_million_tokens == pytest.approx(32.5 / 0.05)
    assert bill.steady_cost_per_million_tokens == pytest.approx(10 / 3600 / 5 * 1e6)
    assert bill.first_result and (bill.first_result.id, bill.first_result.attempts) == (first, 3)
    assert (bill.first_result.hours, bill.first_result.cost) == (3.0, 30.0)


GONE = {"process": {**own_process(), "started": 1}}
"""A process id that is in use by another process now."""


def test_what_is_unknown_stays_unknown(tmp_path: Path):
    run(tmp_path, 0, "running", 0, identity={"recipe": {"name": "debug"}} | GONE)
    run(tmp_path, 1, "finished", 5, cost={"hours": 1.0, "price_per_hour": None})
    (bill,) = bills(attempts(tmp_path))
    assert bill.attempts[0].hours is None and bill.hours == 1.0 and bill.hours_at_least
    assert bill.cost is None and bill.cost_per_million_tokens is None and bill.steady_cost_per_million_tokens is None
    assert bill.compile_unknown == 2 and not bill.saved
    (bill,) = bills(attempts(tmp_path), price_per_hour=2.0)
    assert bill.cost == 2.0


def test_tokens_of_a_run_that_went_on_from_a_finished_one_count_once(tmp_path: Path):
    first = run(tmp_path, 0, steps=10, **priced(1))
    run(tmp_path, 1, steps=20, **priced(1), checkpoints={"resumed_from": {"run": first, "step": 10}})
    (bill,) = bills(attempts(tmp_path))
    assert bill.result_tokens == 20_000


def test_b20_compile_minutes_spent_and_saved_add_up(tmp_path: Path, capsys):
    run(tmp_path, 0, **compiled(100.0, "cold"))
    warm = run(tmp_path, 1, **compiled(20.0, "warm"))
    run(tmp_path, 2, **compiled(60.0, "warm"), work={"tokens_per_step": 2000})
    partial = run(tmp_path, 3, **compiled(70.0, "partial"))
    (bill,) = bills(attempts(tmp_path))
    assert bill.compile_seconds == 250 and bill.saved_seconds == 110
    assert [(each.id, each.seconds) for each in bill.saved] == [(warm, 80), (partial, 30)], "other work is not held against it"
    assert main(["cost", "--runs", str(tmp_path)]) == 0
    assert "4.2 minutes spent on compiling, 1.8 saved by the cache in 2 runs" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys):
    run(tmp_path, 0, steps=4, cost={"hours": 2.0})
    there = ["--runs", str(tmp_path)]
    assert main(["cost", *there]) == 0
    assert "cost n/a: some runs have no price; give it with --price-per-hour or --instance" in capsys.readouterr().out
    assert main(["cost", *there, "--instance", "trn2.48xlarge"]) == 0
    said = capsys.readouterr()
    assert "71.52 USD" in said.out and "Capacity Block" in said.err and "read 2026-10-08" in said.err
    assert main(["cost", *there, "--json", "--price-per-hour", "3"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cost"] == 6
    assert main(["cost", *there, "--instance", "trn9"]) == 2
    assert "--instance: got 'trn9', a price is known for: trn2.48xlarge" in capsys.readouterr().err
    assert main(["cost", *there, "nonesuch"]) == 2
    assert f"cost: got nonesuch, recipes with runs in {tmp_path}: debug" in capsys.readouterr().err


def test_prices_say_where_they_are_from():
    assert price_of("trn2.48xlarge").usd_per_hour == 35.7608
    assert all(price.source.startswith("https://") and len(price.date) == 10 and price.usd_per_hour > 0 for price in prices())


# --- removing --------------------------------------------------------------------------------------------------------------


def test_what_a_removed_run_cost_stays_known(tmp_path: Path, capsys):
    gone = run(tmp_path, 0, "failed", 2, **priced(0.5), **compiled(9.0, "cold"))
    run(tmp_path, 1, "finished", 5, **priced(1.0))
    before = bills(attempts(tmp_path))
    assert main(["rm", "--runs", str(tmp_path), gone]) == 0
    assert f"would remove {gone}, failed" in capsys.readouterr().out and (tmp_path / gone).exists()
    assert main(["rm", "--runs", str(tmp_path), "--yes", gone]) == 0
    assert f"removed {gone}, failed" in capsys.readouterr().out and not (tmp_path / gone).exists()
    assert bills(attempts(tmp_path)) == before
    with open(tmp_path / ".ledger-removed.jsonl", "a") as file:
        file.write('{"id": "cut o')
    assert bills(attempts(tmp_path)) == before
    assert main(["list", "--runs", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_what_is_needed_is_not_removed(tmp_path: Path, capsys):
    running = run(tmp_path, 0, "running", identity={"recipe": {"name": "debug"}, "process": own_process()})
    source = run(tmp_path, 1)
    later = run(tmp_path, 2, checkpoints={"resumed_from": {"run": source, "step": 10}})
    there = ["--runs", str(tmp_path)]
    for yes in ([], ["--yes"]):
        assert main(["rm", *there, *yes, running, source]) == 2
        said = capsys.readouterr().err
        assert f"{running} is running; stop it first" in said and f"{source} is what {later} went on from" in said
    assert main(["rm", *there, "--yes", str(tmp_path.parent)]) == 2
    assert "not in" in capsys.readouterr().err
    assert all((tmp_path / name).exists() for name in (running, source, later))
    assert main(["rm", *there, "--yes", source, later]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [running]


def test_an_interrupted_removal_leaves_no_run_behind(tmp_path: Path, monkeypatch):
    gone = run(tmp_path, 0, **priced(1.0))
    run(tmp_path, 1, **priced(2.0))
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert main(["rm", "--runs", str(tmp_path), "--yes", gone]) == 0
    assert len(attempts(tmp_path)) == 2 and bills(attempts(tmp_path))[0].hours == 3.0
    monkeypatch.undo()
    assert main(["rm", "--runs", str(tmp_path), "--yes", "000001"]) == 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_a_run_writes_tells_how_long_a_killed_one_lived(tmp_path: Path):
    record = RunRecord(replace(RECIPE, run=replace(RECIPE.run, output_dir=str(tmp_path))), [], tmp_path)
    record.content["started_utc"] = (datetime.now(UTC) - timedelta(hours=3)).isoformat(timespec="seconds")
    record.write()
    assert Attempt.of(read_run(record.folder)).hours is None
    record.append_steps([{"step": number} for number in range(1, 4000)])
    found = Attempt.of(read_run(record.folder))
    assert found.hours == pytest.approx(3.0, abs=0.1) and found.hours_at_least and found.last_step == 3999
