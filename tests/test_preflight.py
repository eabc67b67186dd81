"""The preflight command as people use it: one screen, data, what has changed since a run, a list of launches."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from preflight import command_line
from preflight.choices import with_choice
from preflight.rehearsal import rehearse
from preflight.stage import rehearsed_ranks
from preflight.stored import ROOT, parse
from preflight.study import study
from preflight.trees import check_out
from tests.ranks import Processes, train

TINY = ["qwen3_32b_trn2_compiled", "--tiny", "--run.chip", "Trainium2", "--run.device", "neuron"]
RUN = ["debug", "--run.mode", "compile", "--compile.backend", "aot_eager", "--training.steps", "2", "--model.tiny"]
RUN += ["--optimizer.warmup_steps", "0", "--validation.every_steps", "0", "--run.no_tensorboard", "--training.seq_len", "64"]


@pytest.fixture
def preflight(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command; return its exit code and what it printed on either stream."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = command_line.main(arguments)
        return code, *capfd.readouterr()

    return run


def test_one_screen_and_the_same_as_data(preflight, monkeypatch: pytest.MonkeyPatch):
    found = study(parse(TINY))
    monkeypatch.setattr("preflight.study.study", lambda recipe, progress: found)
    code, screen, errors = preflight(*TINY)
    assert code == 0 and errors == ""
    assert len(screen.splitlines()) <= 50
    for said in (
        "4 ranks, TP 4; 64 tokens a step; compiled",
        "selective (chosen)",
        "device memory 24.0 GiB, 1/4 of a Trainium2",
        "2 graphs: ",
        "rank constant",
        "published: 255.7 s (qwen3_32b_trn2_compiled)",
        "fits, with ",
    ):
        assert said in screen, screen

    code, out, _ = preflight(*TINY, "--json")
    data = json.loads(out)
    assert code == 0
    assert [choice["activation_checkpointing"] for choice in data["choices"]] == ["none", "selective", "full"]
    assert data["memory"]["memory_bytes"] == 24 * 2**30
    assert {(graph["direction"], graph["operators"]) for graph in data["inventory"]["graphs"]} == {
        ("forward", 135),
        ("backward", 300),
    }
    assert data["rehearsal"]["parameter_bytes"] == 4 * data["rehearsal"]["num_parameters"]
    assert data["roofline"]["compute_seconds"] == pytest.approx(sum(data["rehearsal"]["flops"].values()) / 158e12)
    assert data["outlook"]["cold"]["seconds"] is None and data["published"] is None
    constants = [finding for finding in data["inventory"]["findings"] if finding["kind"] == "rank constant"]
    assert any("aten.sub.Tensor(int64[1, 64], 3072)" in finding["text"] for finding in constants), "the last rank's first row"
    assert any("models/qwen3/model.py:" in (finding["where"] or "") for finding in constants)

    # What two depths and two batches say of this one is what its own rehearsal says.
    chosen = next(choice for choice in found.choices if choice.is_chosen)
    with rehearsed_ranks(parse(TINY), 4) as ranks:
        others = [rehearse(with_choice(parse(TINY), kind), ranks) for kind in ("none", "selective", "full")]
    assert chosen.peak_bytes == others[1].peak.total_bytes
    assert [choice.peak_bytes for choice in found.choices] == [other.peak.total_bytes for other in others]
    assert [choice.flops for choice in found.choices] == [other.total_flops for other in others]

    # A recipe that does not fit ends with 1, and is told what would.
    tight = [replace(choice, fits=choice.activation_checkpointing == "full") for choice in found.choices]
    assert found.memory is not None
    small = replace(found, choices=tight, memory=replace(found.memory, memory_bytes=2**20))
    monkeypatch.setattr("preflight.study.study", lambda recipe, progress: small)
    code, screen, _ = preflight(*TINY)
    assert code == 1 and "does not fit: " in screen and "--parallel.activation_checkpointing full would" in screen


def test_what_has_changed_since_a_run_and_a_revision(preflight, tmp_path: Path):
    (run,) = train([RUN], 1, tmp_path)
    assert run.codes == [0]
    (folder,) = (tmp_path / "0").iterdir()
    assert (folder / "sources.zip").is_file() and not (folder / "inventory.json").exists()

    found = preflight(*RUN, "--run.output_dir", str(tmp_path / "0"), "--optimizer.lr", "0.5", "--against", folder.name)
    assert found[0] == 0 and "nothing will recompile" in found[1] and "optimizer.lr: 0.001 -> 0.5" in found[1]
    assert (folder / "inventory.json").is_file(), "a run keeps its inventory"

    code, out, _ = preflight(*RUN, "--training.seq_len=128", "--optimizer.lr", "0.5", "--against", str(folder), "--json")
    assert code == 0
    data = json.loads(out)
    assert [cause for cause in data["causes"] if "lr" in cause] == []
    assert "training.seq_len: 64 -> 128" in data["causes"]
    assert len(data["new"]) == 2

    code, _, errors = preflight(*RUN, "--against", "no-such-thing")
    assert code == 2 and "got 'no-such-thing'; allowed: a run's folder or id, a file of --inventory, a git revision" in errors


def test_a_revision_has_its_own_sources(tmp_path: Path):
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("not a git repository")
    check_out("HEAD", tmp_path)
    assert (tmp_path / "train.py").is_file() and (tmp_path / "models/qwen3/model.py").is_file()
    tracked = subprocess.run(["git", "-C", str(ROOT), "show", "HEAD:train.py"], capture_output=True, text=True).stdout
    assert (tmp_path / "train.py").read_text() == tracked


def test_a_campaign_counts_each_graph_once(preflight, tmp_path: Path):
    """Case B25: six launches with two shapes."""
    launches = [
        f"debug --model.tiny --run.mode compile --training.steps 20 --optimizer.lr {lr} --training.seq_len {seq_len}"
        for seq_len in (64, 128)
        for lr in (0.1, 0.01, 0.001)
    ]
    (tmp_path / "campaign").write_text("# a sweep\n\n" + "\n".join(launches) + "\n")
    code, out, errors = preflight("--campaign", str(tmp_path / "campaign"), "--json")
    assert code == 0, errors
    plan = json.loads(out)
    assert [launch["new_graphs"] for launch in plan["launches"]] == [2, 0, 0, 2, 0, 0]
    assert plan["new_graphs"] == 4, "forward and backward of each shape"
    (tmp_path / "campaign").write_text("no_such_recipe --x\n")
    code, _, errors = preflight("--campaign", str(tmp_path / "campaign"))
    assert code == 2 and "unknown recipe 'no_such_recipe'" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "x"], "name a recipe"),
        (["no_such"], "unknown recipe 'no_such'"),
        (["debug", "--against"], "--against needs a value"),
        (["debug", "--parallel.ranks", "3", "--parallel.tensor_parallel_degree", "2"], "parallel."),
        (["--campaign", "no/such/file"], "cannot be read"),
    ],
)
def test_what_cannot_be_found_out_is_one_line(preflight, arguments: list[str], said: str):
    code, _, errors = preflight(*arguments)
    assert code == 2 and said in errors and len(errors.splitlines()) == 1, errors


def test_help(preflight):
    assert "--against WHAT" in preflight("--help")[1] and preflight()[0] == 0


@pytest.mark.distributed
def test_a_run_folder_that_one_rank_does_not_see_is_refused_before_the_first_step(tmp_path: Path):
    """Case C10."""
    program = (
        "import os, sys; folder = sys.argv.pop(1) + os.environ['RANK']; os.mkdir(folder); os.chdir(folder); import train; "
        "sys.exit(train.main())"
    )
    command = ["-c", program, str(tmp_path / "rank"), "debug", "--model.tiny", "--training.steps", "20"]
    with Processes(command, 2, {"PYTHONPATH": str(ROOT)}) as ranks:
        finished = ranks.finish(120)
    for code, output in finished:
        assert code == 1 and "run.output_dir: rank 0 has made" in output and "rank 1 does not see it" in output, output
    (record,) = tmp_path.glob("rank0/runs/*/record.json")
    record = json.loads(record.read_text())
    assert record["status"] == "failed" and "rank 1 does not see it" in record["cause"]
    assert record["timing"]["first_step_seconds"] is None
