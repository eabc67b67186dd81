"""Campaigns: what they run in which order, that they go on after an interruption, and what their table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ledger.campaign import Campaign, Cell, make_plan
from ledger.campaign_results import results
from ledger.command_line import main
from ledger.runs import LedgerError
from recipes.base import RecipeError
from tests.campaign_worker import COMPILED_STEP, EAGER_STEP
from tests.ranks import ROOT

WORKER = f"{sys.executable} -m tests.campaign_worker"


def plan(repeats: int = 2, *overrides: str):
    return make_plan(["debug", *overrides], "ffn", repeats, WORKER)


def run(folder: Path, repeats: int = 1) -> list[str]:
    """Run a campaign to its end and return what it said of its progress."""
    said: list[str] = []
    Campaign(folder, plan(repeats)).run(said.append)
    return said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Folder of a campaign with two repeats, and its progress."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(folder, repeats=2)


def test_order():
    """Modes side by side, and taking turns at being first."""
    assert [str(cell) for cell in plan().cells()] == [
        *("cold eager 1", "cold compile 1", "warm eager 1", "warm compile 1", "edit eager 1", "edit compile 1"),
        *("cold compile 2", "cold eager 2", "warm compile 2", "warm eager 2", "edit compile 2", "edit eager 2"),
    ]


def test_the_table(finished: tuple[Path, list[str]]):
    folder, said = finished
    assert len(said) == 1 + 12 and said[-2] == "[11/12] edit compile 2: first step 2.00 s, 320 tokens/s"
    campaign = Campaign(folder, plan())
    found = results(campaign, [2, 100])
    assert {(each.scenario, each.mode): each.compiled and each.compiled.median for each in found.results} == {
        ("cold", "eager"): 0,
        ("cold", "compile"): 2,
        ("warm", "eager"): 0,
        ("warm", "compile"): 0,
        ("edit", "eager"): 0,
        ("edit", "compile"): 1,
    }
    assert all(len(each.runs) == 2 for each in found.results)
    cold_compiled = next(each for each in found.results if (each.scenario, each.mode) == ("cold", "compile"))
    assert cold_compiled.first_step and cold_compiled.first_step.median == 3.0
    assert cold_compiled.until_first_step and cold_compiled.until_first_step.median == 5.0
    winners = {(each.scenario, each.steps): each for each in found.winners}
    assert [winners["cold", 2].mode, winners["cold", 100].mode, winners["warm", 2].mode] == ["eager", "compile", "compile"]
    assert winners["cold", 100].seconds == pytest.approx({"eager": 1 + 99 * EAGER_STEP, "compile": 3 + 99 * COMPILED_STEP})
    assert winners["cold", 100].cost["eager"] == pytest.approx((1 + 99 * EAGER_STEP) / 3600 * 2)
    crossing = found.crossings["cold"].crossing
    assert crossing is not None and crossing.step == 12  # 1 + 11 x 0.4 > 3 + 11 x 0.2
    assert (found.hours, found.abandoned_hours) == (13 * 0.5, 0.5), "the run that is not measured was paid for too"
    assert not any((folder / "caches").iterdir())


def test_a_campaign_that_broke_off_goes_on_with_the_chain_that_it_was_in(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FAIL_AT", "compile:1")
    with pytest.raises(LedgerError, match=r"warm compile 1 ended with exit code 1; .*\n  no luck today\nwhat is done is kept"):
        run(tmp_path)
    broken = Campaign(tmp_path, plan(1))
    assert [str(cell) for cell, _ in broken] == ["cold eager 1", "cold compile 1", "warm eager 1"]
    monkeypatch.delenv("FAIL_AT")
    run(tmp_path)
    campaign = Campaign(tmp_path, plan(1))
    assert len(list(campaign)) == 6
    # A chain whose cache was met by a run that counts for nothing would give a warm run where a cold one is meant.
    compiled = next(each.compiled for each in results(campaign, [2]).results if each.mode == "compile")
    assert compiled is not None and compiled.low == 2
    assert [each.state for each in campaign.abandoned()].count("killed") == 1, "its process ended without a word"
    ids = [each.id for _, each in campaign]
    assert not run(tmp_path)
    assert [each.id for _, each in Campaign(tmp_path, plan(1))] == ids, "nothing is run twice"


def test_what_does_not_belong_together_is_refused(tmp_path: Path):
    campaign = Campaign(tmp_path, plan(1))
    with pytest.raises(LedgerError, match=r"holds another campaign \(arguments was \['debug'\], is \['debug', '--run.seed'"):
        Campaign(tmp_path, plan(1, "--run.seed", "1"))
    with campaign._alone(), pytest.raises(LedgerError, match="another campaign is running there"):
        campaign.run(lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "edit", "repeats", "message"),
    [
        (["nonesuch"], "ffn", 1, "unknown recipe 'nonesuch'"),
        (["debug", "--help"], "ffn", 1, "allowed: a recipe and its overrides"),
        (["debug"], "wider", 1, "--edit: got 'wider', allowed: depth, ffn"),
        (["debug"], "x=--model.nonesuch 1", 1, "unknown flag '--model.nonesuch'"),
        (["debug"], "ffn", 0, "--repeats: got 0"),
        (["qwen3_32b_trn2_compiled"], "depth", 1, "--launcher: got none, and qwen3_32b_trn2_compiled is made for 64 ranks"),
    ],
)
def test_refused_before_anything_runs(arguments: list[str], edit: str, repeats: int, message: str, capsys):
    with pytest.raises(RecipeError, match=message):
        make_plan(arguments, edit, repeats, None)


def test_edits():
    assert plan().edit == ["--model.ffn_dim", "1536"] and plan().edit_name == "FFN 768 -> 1536"
    deeper = make_plan(["debug"], "depth", 1, None)
    assert deeper.edit[0] == "--model.num_layers" and deeper.edit_name.endswith("layers")
    longer = make_plan(["debug"], "longer=--training.seq_len 512", 1, None)
    command = longer.command(Cell(1, "edit", "eager"), Path("runs"))
    assert command[1:5] == ["train.py", "debug", "--training.seq_len", "512"] and longer.edit_name == "longer"


def test_the_command(finished: tuple[Path, list[str]], capsys):
    folder, _ = finished
    arguments = ["campaign", "--repeats", "2", "--launcher", WORKER, "--folder", str(folder), "--steps", "2,100"]
    assert main([*arguments, "debug"]) == 0
    said = capsys.readouterr()
    assert not said.err, "there is nothing left to run"
    assert "cold: compile is ahead from step 12 on" in said.out and "edit: FFN 768 -> 1536" in said.out
    assert main([*arguments, "--json", "debug"]) == 0
    assert json.loads(capsys.readouterr().out)["winners"][0]["scenario"] == "cold"
    assert main(["campaign", "--folder", str(folder)]) == 2
    assert "name a recipe; allowed: debug" in capsys.readouterr().err


def test_a_stopped_campaign_takes_its_run_along(tmp_path: Path):
    """The run would otherwise go on, and the next campaign in the folder take its time away."""
    program = (
        "import signal, sys\nfrom pathlib import Path\nfrom ledger.campaign import _run\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "_run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)'], Path(sys.argv[1]), {})"
    )
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", program, str(log)], cwd=ROOT, stderr=subprocess.DEVNULL) as job:
        while not (log.exists() and log.read_text()):
            assert job.poll() is None
        job.terminate()
        assert job.wait(20) != 0
