"""The main job from end to end, at tiny size, through the command line that a user types."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch

import train
from backends.base import Memory
from tests.fake_backend import FakeBackend
from training.record import SCHEMA_PATH
from training.timeline import FIRST_STEP, PHASES

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads(SCHEMA_PATH.read_text())
TINY = (
    *("debug", "--model.flavor", "tiny", "--model.vocab_size", "4096", "--training.seq_len", "32"),
    *("--training.local_batch_size", "2", "--optimizer.warmup_steps", "2", "--validation.every_steps", "0"),
    *("--run.log_every", "2", "--run.no_tensorboard"),
)


class Outcome:
    """What one run left behind."""

    def __init__(self, code: int, folder: Path):
        self.code = code
        self.folders = sorted(folder.glob("*")) if folder.exists() else []
        if self.folders:
            self.folder = self.folders[-1]
            self.record = json.loads((self.folder / "record.json").read_text())
            self.steps = [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]
            self.losses = [step["loss"] for step in self.steps]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train at tiny size in this process and return what is left; each call has a folder of its own."""
    count = iter(range(100))

    def start(*flags: str, steps: int = 4) -> Outcome:
        torch._dynamo.reset()
        folder = tmp_path / f"runs{next(count)}"
        code = train.main([*TINY, "--training.steps", str(steps), "--run.output_dir", str(folder), *flags])
        return Outcome(code, folder)

    yield start
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_run_leaves_a_complete_record(run, capsys):
    done = run(*("--validation.every_steps", "3", "--validation.num_batches", "2", "--run.tensorboard"), steps=7)
    assert done.code == 0
    record = done.record
    jsonschema.validate(record, SCHEMA)
    assert record["status"] == "finished" and record["cause"] is None
    assert set(SCHEMA["properties"]) == set(record)  # every section is filled

    timing = record["timing"]
    assert [phase["phase"] for phase in timing["phases"]] == list(PHASES)
    whole = sum(phase["seconds"] for phase in timing["phases"])
    assert whole == pytest.approx(timing["time_to_first_step_seconds"])
    in_step = [phase["seconds"] for phase in timing["phases"] if phase["in_first_step"]]
    assert sum(in_step) == pytest.approx(timing["first_step_seconds"]) and len(in_step) == len(FIRST_STEP)
    assert [(w["first_step"], w["last_step"]) for w in timing["windows"]] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 7)]
    assert timing["steady"]["steps"] == 6

    assert record["work"]["tokens_per_step"] == 64
    assert record["work"]["initialisation"] == "normal(0, 0.02)"  # case D25
    assert [entry["step"] for entry in record["quality"]["validation"]] == [3, 6]
    assert [entry["batches"] for entry in record["quality"]["validation"]] == [2, 2]
    assert record["compile"]["mode"] == "eager" and record["compile"]["cache"]["state"] is None
    assert [step["step"] for step in done.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert "torch==" in (done.folder / "environment.txt").read_text()
    assert list((done.folder / "tensorboard").glob("events*"))
    printed = capsys.readouterr().out
    assert printed.count("pinned memory off") == 1  # case E12
    assert "validation after step 3" in printed and "MFU" in printed


def test_every_number_of_the_record_states_unit_and_scope():
    """Case A22: nobody has to guess what a figure includes."""

    def numbers(node, path=""):
        if isinstance(node, dict):
            kind = node.get("type")
            if kind in ("number", "integer") or (isinstance(kind, list) and {"number", "integer"} & set(kind)):
                yield path, node
            for key, value in node.items():
                yield from numbers(value, f"{path}/{key}")

    found = list(numbers(SCHEMA))
    assert len(found) > 60
    assert [path for path, node in found if not (node.get("unit") and node.get("scope") and node.get("description"))] == []


def test_loss_falls_and_the_same_seed_gives_the_same_losses(run):
    flags = ("--optimizer.lr", "3e-3")
    first, second, other = run(*flags, steps=25), run(*flags, steps=25), run(*flags, "--run.seed", "1", steps=25)
    assert first.losses == second.losses
    assert first.losses != other.losses
    assert abs(first.losses[0] - math.log(4096)) < 0.1  # a fresh model knows nothing
    assert sum(first.losses[-5:]) / 5 < first.losses[0] - 0.5


@pytest.mark.parametrize("flags", [(), ("--compile.region", "model"), ("--parallel.activation_checkpointing", "full")])
def test_compiled_agrees_with_eager(run, flags):
    """In fp32 within 1e-5 per step; the graphs of one block serve all blocks, the validation included."""
    eager = run(steps=5)
    both = ("--run.mode", "compile", "--compile.backend", "aot_eager", *flags)
    compiled = run(*both, "--validation.every_steps", "2", "--validation.num_batches", "1", steps=5)
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-5)
    assert compiled.record["compile"]["late_compiles"] == []
    assert {c["direction"] for c in compiled.record["compile"]["compilations"]} >= {"forward"}
    assert sum(c["direction"] == "forward" for c in compiled.record["compile"]["compilations"]) == 1
    assert compiled.record["timing"]["windows"][0]["disturbed_by"] == "compiled"
    forward = next(phase for phase in compiled.record["timing"]["phases"] if phase["phase"] == "forward")
    assert 0 < forward["compile_seconds"] <= forward["seconds"]


@pytest.mark.slow
def test_inductor_agrees_with_eager(run, tmp_path, monkeypatch):
    """The compiler that people use on the CPU: fp32 losses within 1e-4 over five steps, cold cache then warm."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    eager, compiled = run(steps=5), run("--run.mode", "compile", steps=5)
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-4)
    assert compiled.record["compile"]["cache"]["state"] == "cold"
    assert compiled.record["compile"]["cache"]["after"]["files"] > 0
    assert run("--run.mode", "compile", steps=5).record["compile"]["cache"]["state"] == "warm"


@pytest.mark.parametrize("isolated", [(), ("--data.isolate_documents",)])
def test_accumulation_changes_memory_and_nothing_else(run, isolated):
    """Cases A11 to A13: the mean is over the valid tokens of the whole step, and so is every count."""
    whole = run("--training.local_batch_size", "4", *isolated)
    split = run("--training.local_batch_size", "1", "--training.global_batch_size", "4", *isolated)
    assert split.record["work"]["accumulation_steps"] == 4
    assert [(s["tokens"], s["valid_tokens"]) for s in split.steps] == [(s["tokens"], s["valid_tokens"]) for s in whole.steps]
    assert split.losses == pytest.approx(whole.losses, abs=2e-5)
    norms = [[step["grad_norm"] for step in outcome.steps] for outcome in (whole, split)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_mixed_precision_stays_near_fp32(run):
    fp32, bf16 = run(steps=6), run("--training.dtype", "bfloat16", steps=6)
    assert bf16.losses == pytest.approx(fp32.losses, abs=0.02)
    assert bf16.losses != fp32.losses


def test_activation_checkpointing_changes_memory_and_nothing_else(run):
    assert run("--parallel.activation_checkpointing", "full").losses == pytest.approx(run().losses, abs=1e-6)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_the_step(run, capsys):
    done = run("--optimizer.lr", "1e30", "--optimizer.warmup_steps", "0", "--optimizer.schedule", "constant", steps=20)
    assert done.code == 1
    error = capsys.readouterr().err
    bad = next(step for step in done.steps if step["loss"] is None or step["grad_norm"] is None)
    assert f"step {bad['step']}:" in error and error.count("\n") == 1
    assert done.record["status"] == "failed" and f"step {bad['step']}:" in done.record["cause"]
    assert done.losses[0] is not None and len(done.steps) < 20
    assert done.record["quality"]["non_finite_steps"] >= 1
    jsonschema.validate(done.record, SCHEMA)


def test_compile_that_never_happens_fails(run, capsys):
    """Case E14: asked for, not active, is an error."""
    with torch.compiler.set_stance("force_eager"):
        done = run("--run.mode", "compile", "--compile.backend", "aot_eager")
    assert done.code == 1
    assert "nothing was compiled" in capsys.readouterr().err
    assert done.record["status"] == "failed" and "nothing was compiled" in done.record["cause"]


def test_a_deterministic_run_quotes_no_speed(run, capsys):
    done = run("--run.deterministic")
    timing = done.record["timing"]
    assert timing["deterministic"] and not timing["speed_quoted"]
    assert timing["steady"] is None and timing["tokens_per_second_after_first_step"] is None
    assert {window["tokens_per_second"] for window in timing["windows"]} == {None}
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--model.flavor", "tinny"), "model.flavor: got 'tinny'"),
        (("--model.vocab_size", "256"), "256"),
        (("--training.seq_len", "10000"), "got 10,000"),
        (("--data.source", "files", "--data.path", "nowhere.txt"), "nowhere.txt"),
        (("--data.source", "files", "--data.path", "{empty}"), "empty"),
        (("--data.source", "files", "--data.path", "{short}"), "seq_len"),
        (("--data.tokenizer", "nowhere/tokenizer.json"), "nowhere/tokenizer.json"),
        (("--model.initial_weights", "nowhere"), "nowhere"),
        (("--training.global_batch_size", "3"), "a multiple of local_batch_size"),
        (("--run.device", "neuron"), "--run.device cpu"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_and_leaves_nothing(run, flags, words, tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("few words\n")
    places = {"empty": tmp_path / "empty.txt", "short": tmp_path / "short.txt"}
    done = run(*(flag.format(**places) for flag in flags))
    printed = capsys.readouterr()
    assert done.code == 2
    assert printed.err.startswith("error: ") and words in printed.err
    assert printed.err.count("\n") == 1 or "--run.device" in flags
    assert "Traceback" not in printed.err
    assert done.folders == []


def test_a_cuda_machine_without_cuda_is_told_so(run, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert run("--run.device", "cuda").code == 2
    assert "--run.device cpu" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written_is_refused(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("--run.output_dir", str(tmp_path / "file")).code == 2
    assert "run.output_dir" in capsys.readouterr().err


def test_memory_that_the_device_does_not_report_is_null(run, monkeypatch):
    """Case E4: a query that raises does not stop the run, and nobody's number takes its place."""

    def fail() -> Memory:
        raise RuntimeError("not implemented on this device")

    backend = FakeBackend(memory_query=fail, known_peaks=(), chip_name=None)
    monkeypatch.setattr(train, "get_backend", lambda name: backend)
    done = run()
    assert done.code == 0
    assert set(done.record["memory"].values()) == {None}
    assert done.record["timing"]["mfu"] == []  # case A13: no known peak, no MFU


def test_environment_that_the_backend_sets_is_recorded_with_who_set_it(run, monkeypatch):
    monkeypatch.setenv("FAKE_MINE", "7")
    monkeypatch.delenv("FAKE_YOURS", raising=False)
    wanted = (("FAKE_MINE", "1", "a reason"), ("FAKE_YOURS", "2", "another"))
    monkeypatch.setattr(train, "get_backend", lambda name: FakeBackend(environment=wanted))
    variables = run().record["environment"]["variables"]
    monkeypatch.delenv("FAKE_YOURS")
    assert [(v["name"], v["value"], v["set_by"]) for v in variables] == [
        ("FAKE_MINE", "7", "user"),
        ("FAKE_YOURS", "2", "backend"),
    ]


def test_exported_weights_can_be_trained_on(run, capsys):
    trained = run("--optimizer.lr", "3e-3", "--checkpoint.export", steps=20)
    weights = trained.folder / "checkpoints" / "hf"
    assert "trained from random init, step 20" in (weights / "README.md").read_text()
    again = run("--model.initial_weights", str(weights), "--optimizer.lr", "0")
    assert again.losses[0] < trained.losses[0] - 0.2
    assert again.record["work"]["initialisation"] == str(weights)


@pytest.mark.parametrize("which, disturbed", [("first", [1]), ("steady", [3, 4, 5])])
def test_profile_is_written_and_keeps_out_of_the_steady_speed(run, which, disturbed):
    done = run("--run.profile", which, steps=8)
    assert done.code == 0
    assert [path for path in (done.folder / "profile").rglob("*") if path.is_file() and path.stat().st_size > 1_000]
    windows = [w for w in done.record["timing"]["windows"] if w["disturbed_by"] == "profiled"]
    assert [step for w in windows for step in range(w["first_step"], w["last_step"] + 1)] == disturbed


def test_cost_is_hours_times_price_with_its_source(run):
    done = run("--run.price_per_hour", "36", "--run.price_source", "a price list, 2026-12-01")
    cost = done.record["cost"]
    assert cost["cost"] == pytest.approx(36 * cost["hours"]) and cost["price_source"] == "a price list, 2026-12-01"
    assert run().record["cost"]["cost"] is None


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_closes_its_record(tmp_path, how):
    command = [sys.executable, "-u", "train.py", *TINY, "--training.steps", "100000", "--run.output_dir", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as job:
        for line in job.stdout:
            if line.startswith("step") and " 4/" in line:
                job.send_signal(how)
                break
        job.stdout.read()
        assert job.wait(timeout=60) == 128 + how
    done = Outcome(128 + how, tmp_path)
    assert done.record["status"] == "interrupted" and done.record["finished_utc"]
    assert len(done.steps) >= 4
    last = done.steps[-1]["step"]
    assert done.record["cause"] == f"{how.name}: stopped after step {last}; --resume goes on from there"
    assert [save["step"] for save in done.record["checkpoints"]["saves"]] == [last]
    jsonschema.validate(done.record, SCHEMA)
