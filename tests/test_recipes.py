"""Recipes and the command line: what is refused, and in which words."""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train
from models import model_config
from recipes import command_line
from recipes.base import Recipe, RecipeError

ROOT = Path(__file__).resolve().parent.parent
DEBUG = command_line.load("debug")


@pytest.mark.parametrize("name", command_line.names())
def test_every_recipe_is_legal_and_describes_itself(name):
    recipe = command_line.load(name)
    assert recipe.name == name
    assert recipe.description
    degree = recipe.parallel.tensor_parallel_degree
    recipe.check(recipe.parallel.ranks)
    assert model_config(recipe.model, recipe.training.seq_len, degree).num_parameters > 0
    tiny = recipe.tiny()
    tiny.check(tiny.parallel.ranks)
    assert model_config(tiny.model, tiny.training.seq_len, degree).num_parameters < 2_000_000
    assert tiny.parallel == replace(recipe.parallel, ranks=degree), "the twin keeps the layout"


def change(recipe: Recipe, path: str, value) -> Recipe:
    section, field = path.split(".")
    return replace(recipe, **{section: replace(getattr(recipe, section), **{field: value})})


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("training.steps", 0, "training.steps: got 0, allowed: more than 0"),
        ("training.steps", 3, "optimizer.warmup_steps: got 10, allowed: at most training.steps = 3"),
        ("training.local_batch_size", -1, "got -1, allowed: more than 0"),
        ("training.global_batch_size", 6, "got 6, allowed: a multiple of local_batch_size x data-parallel ranks = 4; use 4"),
        ("training.dtype", "fp16", "training.dtype: got 'fp16', allowed: float32, bfloat16"),
        ("optimizer.lr", -1.0, "optimizer.lr: got -1.0, allowed: 0 or more"),
        ("optimizer.lr", float("nan"), "optimizer.lr: got nan"),
        ("optimizer.betas", (0.9, 1.0), "got 1.0, allowed: 0 or more and less than 1"),
        ("optimizer.min_lr_ratio", 1.5, "allowed: 0 to 1"),
        ("data.path", "x.txt", "set --data.source files or hub"),
        ("data.source", "files", "data.path: got none with data.source files"),
        ("data.subset", "en", "data.subset: got 'en'"),
        ("data.held_out_every", 1, "allowed: 2 or more"),
        ("run.device", "tpu", "run.device: got 'tpu', allowed: cpu, cuda, neuron"),
        ("run.price_per_hour", 35.76, "run.price_source: got none with a price"),
        ("compile.backend", "eager", "set --run.mode compile"),
    ],
)
def test_broken_rules_say_what_got_allowed_and_the_fix(path, value, words):
    with pytest.raises(RecipeError) as refusal:
        change(DEBUG, path, value).check()
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


TP4 = command_line.load("qwen3_8b_trn2")
REPLICAS, SHARDS, TENSOR, WRAPPER = (
    f"parallel.{name}"
    for name in (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "data_parallel_wrapper",
    )
)
WHOLE_MODEL = {"run.mode": "compile", "compile.region": "model"}


@pytest.mark.parametrize(
    "recipe, changes, world_size, words",
    [
        # D4: before a model is built.
        (
            TP4,
            {"training.seq_len": 30},
            64,
            "got 30, allowed: a multiple of parallel.tensor_parallel_degree = 4",
        ),
        (
            TP4,
            {},
            1,
            "got 4 with ranks = 1, allowed: a divisor of the ranks; start more of them (torchrun",
        ),
        (TP4, {}, 6, "got 4 with ranks = 6"),
        (
            TP4,
            {SHARDS: 8},
            64,
            "1 replicas x 8 shards x 4 tensor-parallel ranks, allowed: a product",
        ),
        (TP4, {REPLICAS: 3}, 64, "3 replicas x the remaining shards x 4"),
        (TP4, {REPLICAS: 16}, 64, "leaves nothing to shard over"),
        (
            TP4,
            {WRAPPER: "ddp"},
            64,
            "got ddp with 1 replicas x the remaining shards x 4 tensor-parallel",
        ),
        (
            DEBUG,
            {WRAPPER: "ddp", SHARDS: 2},
            2,
            "got ddp with 1 replicas x 2",
        ),
        (
            DEBUG,
            {"run.mode": "compile", "compile.region": "model"},
            2,
            "got model with data_parallel_wrapper fsdp2",
        ),
        (
            TP4,
            {**WHOLE_MODEL, "parallel.activation_checkpointing": "full"},
            4,
            "which torch 2.13 cannot compile, allowed: block",
        ),
        (
            DEBUG,
            {"parallel.prefetch_blocks": 1, WRAPPER: "simple_fsdp"},
            2,
            "parallel.prefetch_blocks: got 1 with data_parallel_wrapper simple_fsdp, allowed: 0",
        ),
        (DEBUG, {TENSOR: 0}, 1, "parallel.tensor_parallel_degree: got 0, allowed: more than 0"),
        # B8: a time-out has a unit, and a value that was meant in another one is refused.
        (DEBUG, {"comm.first_step_timeout_seconds": 7_200_000.0}, 1, "at most 604,800 (a week); the unit is seconds"),
        (DEBUG, {"comm.step_timeout_seconds": 0.0}, 1, "comm.step_timeout_seconds: got 0.0, allowed: more than 0"),
        (DEBUG, {"comm.heartbeat_seconds": float("nan")}, 1, "comm.heartbeat_seconds: got nan"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(recipe, changes, world_size, words):
    for path, value in changes.items():
        recipe = change(recipe, path, value)
    with pytest.raises(RecipeError) as refusal:
        recipe.check(world_size)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_whole_time_out_is_taken_as_seconds():
    recipe = change(DEBUG, "comm.first_step_timeout_seconds", 7200.0)
    recipe.check()
    assert "comm.first_step_timeout_seconds = 7200.0" in command_line.lines(recipe)


def test_published_work_is_65_536_tokens_a_step():
    for name in ("qwen3_8b_trn2", "qwen3_32b_trn2_eager", "qwen3_32b_trn2_compiled", "qwen3_32b_h200x8"):
        recipe = command_line.load(name)
        ranks = recipe.parallel.ranks
        assert recipe.tokens_per_step(ranks) == 65_536
        assert recipe.data_parallel_size(ranks) == recipe.shard_degree(ranks) == ranks // recipe.parallel.tensor_parallel_degree


def test_the_compiled_recipe_differs_from_the_eager_one_where_it_says():
    eager, compiled = (command_line.lines(command_line.load(f"qwen3_32b_trn2_{mode}")) for mode in ("eager", "compiled"))
    assert set(compiled) - set(eager) == {"run.mode = 'compile'"}


@pytest.mark.parametrize("name", [name for name in command_line.names() if name != "debug"])
def test_every_recipe_says_hardware_launch_line_and_that_it_has_not_run(name):
    text = (importlib.import_module(f"recipes.{name}").__doc__ or "").replace("\n", " ")
    assert "Hardware:" in text or "Hardware," in text
    assert f"launch_trn2.sh {name}" in text or f"train.py {name}" in text
    assert f"{name} --tiny" in text
    assert "ot yet run" in text


def test_tiny_is_the_same_layout_on_the_cpu(capsys):
    assert train.main(["qwen3_32b_trn2_compiled", "--tiny", "--dry-run", "--training.steps", "3"]) == 0
    lines = set(capsys.readouterr().out.splitlines())
    assert {"model.flavor = '32B'", "model.tiny = True", "run.device = 'cpu'", "run.mode = 'compile'"} <= lines
    assert {
        "parallel.tensor_parallel_degree = 4",
        "parallel.ranks = 4",
        "data.source = 'stdlib'",
        "training.steps = 3",
    } <= lines


def test_several_broken_rules_are_named_at_once():
    with pytest.raises(RecipeError, match=r"training\.steps.*run\.log_every"):
        change(change(DEBUG, "training.steps", 0), "run.log_every", 0).check()


def test_work_of_a_step_counts_accumulation():
    recipe = change(DEBUG, "training.global_batch_size", 16)
    assert recipe.accumulation_steps() == 4
    assert recipe.tokens_per_step() == 16 * 256
    assert DEBUG.accumulation_steps() == 1
    assert recipe.accumulation_steps(world_size=2) == 2


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["debgu"], "unknown recipe 'debgu', nearest: debug"),
        (["my_run.toml"], "a recipe is a name, not a file"),
        (["--training.steps", "3"], "the recipe comes first"),
        (["debug", "--training.stepz", "3"], "nearest: --training.steps"),
        (["debug", "--trainning.steps=3"], "nearest: --training.steps"),
        (["debug", "--training.steps", "many"], "--training.steps"),
        (["debug", "--training.steps"], "Missing value for argument '--training.steps'"),
        (["debug", "--run.device", "tpu"], "Expected one of ('cpu', 'cuda', 'neuron')"),
        (["debug", "stray"], "stray"),
        (["debug", "--name", "other"], "unknown flag '--name'"),
    ],
)
def test_a_command_line_that_cannot_be_read_gets_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("error: ")
    assert words in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--training.seq_len", "--training.seq-len"])
def test_overrides_reach_the_recipe(flag, capsys):
    assert train.main(["debug", flag, "64", "--run.deterministic", "--run.no-tensorboard", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"training.seq_len = 64", "run.deterministic = True", "run.tensorboard = False"} <= set(lines)
    assert "training.steps = 100" in lines


def test_help_lists_recipes_and_explains_fields(capsys):
    assert train.main(["--help"]) == 0
    assert "debug" in capsys.readouterr().out
    assert train.main(["debug", "--help"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "--training.global_batch_size" in page
    assert "accumulates gradients" in page  # case A22: the help says what a number includes


@pytest.mark.parametrize(
    "arguments", [["--help"], ["debug", "--help"], ["debug", "--dry-run"], ["nope"], ["debug", "--x", "1"]]
)
def test_nothing_heavy_is_imported_to_answer(arguments):
    program = (
        "import sys, train\n"
        f"train.main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'datasets', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
