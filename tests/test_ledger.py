"""The ledger over records of every kind: whole, edited, cut off, of the future, of killed runs; and what it answers."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ledger import claims
from ledger.break_even import Pace, break_even, find_pace
from ledger.command_line import main
from ledger.compare import compare
from ledger.runs import INDEX, LedgerError, list_rows, read_run
from ledger.verdict import CANNOT_TELL, NOT_REPRODUCED, REPRODUCED, judge, rederive
from recipes import command_line
from tests.durable import run
from tests.ranks import ROOT
from training.strays import own_process

EAGER, COMPILED = "claim:qwen3_32b_trn2/eager", "claim:qwen3_32b_trn2/compile"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A folder with two runs of the same work and one of other work."""
    folder = tmp_path_factory.mktemp("real")
    priced = ("--run.price_per_hour", "36", "--run.price_source", "a list")
    for number, flags in enumerate([(), ("--run.seed", "1"), ("--training.seq_len", "64", *priced)]):
        done = run(folder, *flags, steps=12)
        done.folder.rename(folder / f"20260101-00000{number}-debug-{number:06x}")  # they may have begun within one second
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def edit(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | changes))


@pytest.fixture
def runs(real: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may spoil."""
    shutil.copytree(real, tmp_path / "runs")
    return tmp_path / "runs"


# --- whatever a folder holds ----------------------------------------------------------------------------------------------


def test_every_state_is_listed_and_breaks_nothing(runs: Path, capsys):
    whole = runs / names(runs)[0]

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, runs / f"20990101-0000{name}"))

    (copy("01-cut") / "record.json").write_text((whole / "record.json").read_text()[:1000])
    edit(copy("02-future"), schema_version=99)
    edit(copy("03-edited"), status="splendid", timing="none", cost={"hours": "many"}, work=[1])
    (copy("04-none") / "record.json").unlink()
    (copy("05-list") / "record.json").write_text("[1, 2]")
    (copy("06-empty") / "record.json").write_text("")
    identity = json.loads((whole / "record.json").read_text())["identity"]
    dead = own_process() | {"started": 1}
    edit(copy("07-killed"), status="running", identity=identity | {"process": dead})
    edit(copy("08-alive"), status="running", identity=identity | {"process": own_process()})
    edit(copy("09-elsewhere"), status="running", identity=identity | {"process": dead | {"machine": "another"}})
    (copy("10-bytes") / "record.json").write_bytes(b"\xff\xfe{")
    (runs / "notes").mkdir()
    for _ in range(2):  # the second time out of the index
        states = {row.id.rpartition("-")[2]: row for row in list_rows(runs)}
        assert {name: row.state for name, row in states.items() if row.id.startswith("2099")} == {
            "cut": "unreadable",
            "future": "finished",
            "edited": "splendid",
            "none": "no record",
            "list": "unreadable",
            "empty": "unreadable",
            "killed": "killed",
            "alive": "running",
            "elsewhere": "running",
            "bytes": "unreadable",
        }
        assert "schema_version 99, this version knows 1" in str(states["future"].problem)
        assert states["edited"].hours is None and states["edited"].problem == "record.json: status 'splendid': edited"
        assert "notes" not in states
    for name in names(runs):
        if name != "notes":
            assert main(["show", name, "--runs", str(runs)]) == 0
            assert main(["verdict", name, "--claim", "qwen3_32b_trn2", "--runs", str(runs)]) == 0
    assert main(["compare", *names(runs)[:-1], "--runs", str(runs)]) == 1
    assert main(["list", "--runs", str(runs)]) == 0 and main(["list", "--csv", "--runs", str(runs)]) == 0
    assert "its process is gone" in capsys.readouterr().out


def test_the_index_is_only_a_memory(runs: Path):
    before = list_rows(runs)
    assert (runs / INDEX).exists() and list_rows(runs) == before
    first = runs / names(runs)[0]
    edit(first, status="failed")
    assert [row.state for row in list_rows(runs)] == ["failed", "finished", "finished"]
    shutil.rmtree(first)
    assert len(list_rows(runs)) == 2
    for spoilt in ("", "[]", '{"version": 1, "columns": [], "rows": {}}'):
        (runs / INDEX).write_text(spoilt)
        assert len(list_rows(runs)) == 2
    (runs / INDEX).unlink()
    (runs / INDEX).mkdir()  # cannot be written
    assert len(list_rows(runs)) == 2
    assert not list(runs.glob("*.partial"))


def test_two_that_list_at_once_lose_nothing(runs: Path):
    """Each writes an index of its own and puts it in place whole."""
    program = "import sys; from ledger.command_line import main; sys.exit(main(['list', '--json', '--runs', sys.argv[1]]))"
    command = [sys.executable, "-c", program, str(runs)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and len(json.loads(out)) == 3
    assert len(list_rows(runs)) == 3 and json.loads((runs / INDEX).read_text())["rows"].keys() == set(names(runs))


def test_names_are_found_by_a_part_and_refused_when_it_is_not_enough(runs: Path, capsys):
    whole = names(runs)[0]
    assert main(["show", whole[-6:], "--runs", str(runs)]) == 0
    assert main(["show", str(runs / whole)]) == 0
    for question, said in (
        (["show", "debug", "--runs", str(runs)], "3 runs have that in their names"),
        (["show", "nothing", "--runs", str(runs)], "no run has that name"),
        (["show", "./nowhere"], "no such run folder"),
        (["list", "--runs", str(runs / "nowhere")], "does not exist; name another folder with --runs"),
        (
            ["verdict", whole, "--claim", "mine", "--runs", str(runs)],
            "allowed: flexattention_trn3, gpt_oss_20b_trn2",
        ),
        (["breakeven", whole, "claim:qwen3_32b_trn2/fast", "--runs", str(runs)], "got mode 'fast', allowed: claim:"),
        (["breakeven", EAGER, COMPILED, "--steps", "0"], "--steps: got '0', allowed: whole numbers of 1 or more, with commas"),
        (["breakeven", EAGER, COMPILED, "--steps", "20 100"], "--steps: got '20 100', allowed: whole numbers"),
        (["compare", whole, "--runs", str(runs)], "name at least two runs"),
    ):
        capsys.readouterr()
        assert main(question) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and said in err and len(err.splitlines()) == 1, err


def test_one_flat_row_per_run(runs: Path, capsys):
    """Every knob beside every number."""
    assert main(["list", "--csv", "--runs", str(runs)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 3
    row = rows[2]
    knobs = [line.partition(" = ")[0] for line in command_line.lines(command_line.load("debug"))]
    assert set(knobs) <= set(row)
    assert row["training.seq_len"] == "64" and row["run.price_per_hour"] == "36.0"
    assert float(row["timing.first_step_seconds"]) > 0 and float(row["timing.phases.forward.seconds"]) > 0
    assert row["compile.late_compiles"] == "" and float(row["cost.cost"]) > 0


# --- compare --------------------------------------------------------------------------------------------------------------


def test_the_same_work_is_compared(runs: Path, capsys):
    one, two, _ = names(runs)
    found = compare([read_run(runs / one), read_run(runs / two)])
    assert found.comparable and found.interval is not None and found.loss_gap is not None
    assert found.interval.low <= found.interval.ratio <= found.interval.high
    assert found.loss_gap.steps == 12 and found.loss_gap.gap != 0, "another seed, other losses"
    assert main(["compare", one, two, "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "not comparable" not in out and "95 % of the bootstrap" in out and "furthest apart in step" in out
    steady = next(row for row in found.figures if row.name == "a steady step")
    assert steady.ratio == pytest.approx(steady.values[1] / steady.values[0])


def test_e8_another_size_of_logical_core_is_other_work(runs: Path, capsys):
    one, two, _ = names(runs)
    for name, size in ((one, 1), (two, 2)):
        environment = json.loads((runs / name / "record.json").read_text())["environment"]
        edit(runs / name, environment=environment | {"device_facts": {"logical_core_config": size}})
    assert main(["compare", one, two, "--runs", str(runs)]) == 1
    out = capsys.readouterr().out
    assert "not comparable" in out and re.search(r"logical cores\W+1\W+2\b", out), out


def test_unequal_work_is_shown_and_not_divided(runs: Path, capsys):
    one, _, other = names(runs)
    assert main(["compare", one, other, "--runs", str(runs)]) == 1
    out = capsys.readouterr().out
    assert "not comparable: the runs did not do the same work" in out and "seq_len" in out and "tokens per step" in out
    assert "steady tokens/s" not in out and "bootstrap" not in out
    assert main(["compare", one, other, "--anyway", "--runs", str(runs)]) == 1
    out = capsys.readouterr().out
    assert "of UNEQUAL work" in out and "steady tokens/s" in out
    assert main(["compare", one, other, "--json", "--runs", str(runs)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["comparable"] is False and "figures" not in data


# --- break-even -----------------------------------------------------------------------------------------------------------


def test_the_published_break_even_from_the_claims_figures_alone(tmp_path: Path, capsys):
    found = break_even(find_pace(EAGER, tmp_path), find_pace(COMPILED, tmp_path))
    assert found.crossing is not None and found.crossing.step == 57 and "compile" in found.crossing.ahead
    totals = {steps: (round(found.a.total(steps), 1), round(found.b.total(steps), 1)) for steps in (20, 100)}
    assert totals == {20: (296.8, 343.7), 100: (769.2, 714.0)}
    assert found.winner(56) is found.a and found.winner(57) is found.b
    assert main(["breakeven", COMPILED, EAGER, "--price-per-hour", "35.7608"]) == 0
    out = capsys.readouterr().out
    assert "qwen3_32b_trn2/compile (published) is ahead from step 57 on: 515.0 s, 3,735,552 tokens, 5.12 USD" in out


def test_a19_break_even_by_hand():
    """First step 10 s and 30 s, then 2 s and 1 s: even after 20 further steps, ahead with step 22."""
    slow, fast = Pace("a", 10.0, 2.0, 2.0, 2.0, 100, None), Pace("b", 30.0, 1.0, 1.0, 1.0, 100, "cold")
    found = break_even(slow, fast)
    assert found.crossing is not None and found.crossing.step == 22
    assert slow.total(21) == fast.total(21) == 50.0
    assert (found.crossing.seconds, found.crossing.tokens, found.crossing.cost) == (51.0, 2200, None)


def test_the_spread_of_the_steps_gives_the_interval():
    slow, fast = Pace("a", 10.0, 2.0, 1.9, 2.2, 100, None), Pace("b", 30.0, 1.0, 0.9, 1.1, 100, None)
    found = break_even(slow, fast)
    assert (found.earliest_step, found.latest_step) == (17, 27)
    never = break_even(slow, Pace("b", 30.0, 1.95, 1.9, 2.3, 100, None))
    assert never.crossing is not None and never.latest_step is None
    assert break_even(slow, Pace("b", 30.0, 3.0, 3.0, 3.0, 100, None)).crossing is None
    with pytest.raises(LedgerError, match="not comparable: a step of a is 100 tokens, one of b 200"):
        break_even(slow, Pace("b", 30.0, 1.0, 1.0, 1.0, 200, None))


def test_totals_are_what_the_run_took(runs: Path):
    """First step and medians against what the windows add up to."""
    found = find_pace(names(runs)[0], runs)
    record = json.loads((runs / names(runs)[0] / "record.json").read_text())
    windows = sum(window["seconds"] for window in record["timing"]["windows"])
    assert found.total(12) == pytest.approx(windows, rel=0.5)  # steps of milliseconds; benchmarks/ has the real ones


def test_a_run_without_a_steady_step_has_no_pace(runs: Path):
    short = run(runs, "--optimizer.warmup_steps", "0", steps=1)
    with pytest.raises(LedgerError, match="has not recorded a steady step"):
        find_pace(short.folder.name, runs)


# --- verdict --------------------------------------------------------------------------------------------------------------


def published_record(mode: str = "compile", **changes: Any) -> dict[str, Any]:
    """A record that says what the claim says, as a Trn2 run would."""
    record = {
        "schema_version": 1,
        "status": "finished",
        "identity": {"recipe": {"name": "qwen3_32b_trn2_compiled", "run": {"mode": mode, "chip": None}}},
        "environment": {"device": "neuron", "device_facts": {"chip": "Trainium2"}},
        "work": {
            "parameters": 32762123264,
            "world_size": 64,
            "dtype": "bfloat16",
            "seq_len": 4096,
            "tokens_per_step": 65536,
            "layout": {
                "tensor_parallel_degree": 4,
                "data_parallel_shard_degree": 16,
                "activation_checkpointing": "selective",
            },
        },
        "timing": {
            "first_step_seconds": 250.0,
            "steady": {"tokens_per_second": 14_000.0},
            "mfu": [{"numerator": "torchtitan", "mfu": 0.301}],
            "deterministic": False,
        },
    }
    for path, value in changes.items():
        *above, last = path.split("__")
        place = record
        for name in above:
            place = place[name]
        place[last] = value
    return record


def judged(tmp_path: Path, **changes: Any):
    folder = tmp_path / "20261203-000000-qwen3-abcdef"
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(json.dumps(published_record(**changes)))
    return judge(read_run(folder), claims.load("qwen3_32b_trn2"))


def test_what_was_published_is_reproduced_or_not(tmp_path: Path):
    found = judged(tmp_path)
    assert found.verdict == REPRODUCED and {finding.verdict for finding in found.findings} == {REPRODUCED}
    slow = judged(tmp_path, timing__steady={"tokens_per_second": 10_000.0})
    assert slow.verdict == NOT_REPRODUCED
    assert next(f.reason for f in slow.findings if f.name == "tokens_per_second") == "-29.4%, allowed: 5% either way"
    unknown = judged(tmp_path, timing__first_step_seconds=None)
    assert unknown.verdict == CANNOT_TELL


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"environment__device": "cpu"}, "other device (cpu, published: neuron)"),
        ({"environment__device_facts": {"chip": "Trainium3"}}, "other chip (Trainium3, published: Trainium2)"),
        ({"work__seq_len": 2048}, "other work (seq_len 2048, inferred: 4096)"),
        ({"work__world_size": 32}, "other work (world_size 32, published: 64)"),
        ({"mode": "profile"}, "other mode (profile, published: eager, compile)"),
    ],
)
def test_other_work_cannot_be_told_and_gets_no_percentage(changes: dict[str, Any], reason: str, tmp_path: Path):
    found = judged(tmp_path, **changes)
    assert found.verdict == CANNOT_TELL
    assert {finding.reason for finding in found.findings} == {reason} and "%" not in reason


def test_a_cpu_record_cannot_tell(runs: Path, capsys):
    assert main(["verdict", names(runs)[0], "--claim", "qwen3_32b_trn2", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "other device (cpu, published: neuron)" in out and "verdict: cannot tell" in out


def test_the_published_mfu_comes_out_under_one_convention_alone():
    claim = claims.load("qwen3_32b_trn2")
    for mode, peak_667 in (("eager", 0.2264), ("compile", 0.2887)):
        derived = list(rederive(claim, mode))
        assert len(derived) == 6
        (published,) = [row for row in derived if row.is_the_claimed_one]
        assert published.numerator == "torchtitan" and published.peak_flops_per_chip == 632e12
        assert published.flops_per_token == pytest.approx(217.68e9, rel=1e-4)
        other = next(row for row in derived if row.numerator == "torchtitan" and row.peak_flops_per_chip == 667e12)
        assert other.mfu == pytest.approx(peak_667, abs=1e-4)


def test_claims_say_what_is_known_and_agree_with_the_recipes():
    assert claims.names() == ["flexattention_trn3", "gpt_oss_20b_trn2", "qwen3_32b_trn2"]
    for name in claims.names():
        claim = claims.load(name)
        assert claim.source and claim.date and claim.title
        for value in claim.work.values():
            assert value.status in claims.STATUSES and (value.value is None) == (value.status == "unknown")
            assert value.status != "inferred" or value.note, f"{name}: says not from what it was inferred"
        assert all(figure in claim.tolerance for row in claim.rows.values() for figure in row)
    assert claims.load("gpt_oss_20b_trn2").figure("compile", "compile_seconds") == 27 * 60 + 17
    assert claims.load("flexattention_trn3").figure("compile", "passed") == 89
    claim = claims.load("qwen3_32b_trn2")
    for mode, recipe in (("eager", "qwen3_32b_trn2_eager"), ("compile", "qwen3_32b_trn2_compiled")):
        published = command_line.load(recipe).published
        assert published is not None
        assert claim.figure(mode, "tokens_per_second") == published.tokens_per_second
        assert claim.figure(mode, "first_step_seconds") == published.first_step_seconds
        assert claim.figure(mode, "mfu") == published.mfu


def test_the_claims_counts_are_the_models():
    from models import model_config
    from recipes.base import Model
    from training.flops import count_flops

    config, claim = model_config(Model(family="qwen3", flavor="32B"), 4096), claims.load("qwen3_32b_trn2")
    assert claim.fact("parameters") == config.num_parameters
    assert claim.fact("embedding_parameters") == config.num_embedding_parameters
    assert {row.numerator: row.flops_per_token for row in rederive(claim, "eager")} == {
        numerator: count_flops(config, 4096, numerator).flops_per_token for numerator in ("torchtitan", "causal-half", "6N")
    }


def test_the_ledger_needs_no_torch():
    program = "import sys, ledger.command_line; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.split() == ["False", "False"], done.stderr
