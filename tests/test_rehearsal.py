"""What the rehearsal says of a step, against calculations by hand and against what really happens on CPU ranks."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from models import model_config
from preflight.rehearsal import Rehearsal, rehearse
from preflight.stage import Attention, rehearsed_ranks
from preflight.stored import parse
from tests import simulated_neuron
from tests.ranks import train

PROFILED = 3
"""Optimizer steps in a steady profile."""
LONGER = ["--training.seq_len", "256", "--training.local_batch_size", "2", "--training.steps", "5"]
LONGER += ["--optimizer.warmup_steps", "0", "--run.no_tensorboard", "--validation.every_steps", "0"]


def rehearsed(*arguments: str, attention: Attention = "fused") -> Rehearsal:
    recipe = parse(arguments)
    with rehearsed_ranks(recipe, recipe.parallel.ranks) as ranks:
        return rehearse(recipe, ranks, attention)


def mesh(ranks: int, tensor: int, *more: str) -> list[str]:
    return ["--parallel.ranks", str(ranks), "--parallel.tensor_parallel_degree", str(tensor), *more]


# --- by hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "full"])
def test_the_published_layout_by_hand(kind: str):
    """Qwen3-32B's width on TP 4 x FSDP 16, with 4 of its 64 blocks; within 1 %."""
    arguments = ("qwen3_32b_trn2_eager", "--model.num_layers", "4", "--parallel.activation_checkpointing", kind)
    found, config = rehearsed(*arguments), model_config(parse(arguments).model)
    tokens, tensor, shards, layers = 4096, 4, 16, 4

    assert found.num_parameters == pytest.approx(config.num_parameters / 64, rel=0.01)
    assert found.parameter_bytes == found.gradient_bytes == 4 * found.num_parameters
    # AdamW: two moments, and a count of steps on the host for each parameter.
    assert found.optimizer_bytes == pytest.approx(8 * found.num_parameters, rel=0.01)

    in_products = config.num_parameters - config.num_embedding_parameters
    in_blocks = in_products - config.num_embedding_parameters
    forward = 2 * in_blocks * tokens / tensor + 4 * tokens**2 * config.num_heads * config.head_dim * layers / tensor
    head = 2 * config.num_embedding_parameters * tokens / tensor
    # Of attention, a fused kernel computes the scores again in the backward pass: five products for the forward pass's two.
    attention = 4 * tokens**2 * config.num_heads * config.head_dim * layers / tensor
    backward = 2 * (forward - attention) + 2.5 * attention + 2 * head
    # The last product of a block is not computed again: nothing needs its result.
    again = forward - 2 * layers * config.dim * config.ffn_dim * tokens / tensor if kind == "full" else 0
    assert found.flops["forward"] == pytest.approx(forward + head, rel=0.01)
    assert found.flops["backward"] == pytest.approx(backward + again, rel=0.01)

    moved = {(messages.kind, messages.group): messages for messages in found.collectives}
    whole = config.num_parameters / tensor  # of the tensor-parallel rank's part
    head_unit = config.num_embedding_parameters / tensor  # it is not gathered twice
    assert moved["all-gather", "dp_shard"].bytes == pytest.approx(2 * (2 * whole - head_unit), rel=0.01)
    assert moved["reduce-scatter", "dp_shard"].bytes == pytest.approx(4 * whole, rel=0.01)
    assert moved["all-gather", "dp_shard"].count == 2 * (layers + 2) - 1
    assert moved["reduce-scatter", "dp_shard"].count == layers + 2
    assert shards == 16

    # Sequence parallel: into attention and feed-forward, and into the head; the embedding's output is scattered.
    activations = 2 * tokens * config.dim
    passes = 3 if kind == "full" else 2
    gathers = 2 * layers * passes + 2
    assert moved["all-gather", "tp"].bytes == pytest.approx(gathers * activations, rel=0.01)
    assert moved["all-gather", "tp"].count == gathers


def test_qwen3_32b_as_the_prototype_measured_it():
    """FLOPs and parameters of one rank of 64; 16 blocks stand for 64, each of which is like the others."""
    small, large = (rehearsed("qwen3_32b_trn2_eager", "--model.num_layers", str(number)) for number in (2, 4))
    per_block = (large.total_flops - small.total_flops) / 2
    assert (small.total_flops + 62 * per_block) / 1e12 == pytest.approx(250.7, rel=0.001)
    assert small.parameter_bytes + 31 * (large.parameter_bytes - small.parameter_bytes) == pytest.approx(
        1.907 * 2**30, rel=0.001
    )


# --- against what happens -------------------------------------------------------------------------------------------------

TWINS = {
    # ranks: name: arguments
    1: {
        "as it is": ["qwen3_0_6b", "--tiny", *mesh(1, 1)],
        "accumulation": ["qwen3_8b_trn2", "--tiny", *mesh(1, 1), "--training.global_batch_size", "6"],
    },
    2: {
        "FSDP 2, selective": ["qwen3_8b_trn2", "--tiny", *mesh(2, 1)],
        "TP 2, full": ["qwen3_32b_trn2_eager", "--tiny", *mesh(2, 2), "--parallel.activation_checkpointing", "full"],
        "FSDP 2 in fp32": ["qwen3_0_6b", "--tiny", *mesh(2, 1), "--training.dtype", "float32"],
    },
    4: {"TP 2 x FSDP 2": ["qwen3_32b_trn2_eager", "--tiny", *mesh(4, 2), "--parallel.activation_checkpointing", "none"]},
}


def measured(plans: list[list[str]], ranks: int, folder: Path, **keywords):
    """Train, and yield for each run what it held, its messages by kind, the bytes at its fullest moment, and its record."""
    plans = [[*plan, "--run.profile", "steady"] for plan in plans]
    runs = train(plans, ranks, folder, module="tests.measured_train", **keywords)
    printed = re.split(r"^RUN \d+ .*$", runs[0].outputs[0], flags=re.MULTILINE)
    for number, run in enumerate(runs):
        assert run.codes == [0] * ranks
        held = [json.loads(line[5:]) for line in printed[number].splitlines() if line.startswith("HELD ")][-1]
        (trace,) = (folder / str(number)).glob("**/profile/rank0-*/trace.json")
        events = json.loads(trace.read_text())["traceEvents"]
        moved = {kind: (count / PROFILED, size / PROFILED) for kind, (count, size) in messages(events).items()}
        yield tuple(held.values()), moved, highest(events), run.record


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", TWINS)
def test_what_is_rehearsed_happens(ranks: int, tmp_path: Path):
    plans = [[*arguments, *LONGER] for arguments in TWINS[ranks].values()]
    for plan, (held, moved, peak, _) in zip(plans, measured(plans, ranks, tmp_path), strict=True):
        found = rehearsed(*plan)
        assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == held, plan
        assert by_kind(found) == moved, plan
        always = found.parameter_bytes + found.optimizer_bytes + found.table_bytes
        assert found.peak.total_bytes - always == pytest.approx(peak, rel=0.10), plan


@pytest.mark.distributed
def test_what_is_rehearsed_happens_on_the_stand_in(tmp_path: Path):
    """Which counts the bytes of its device; its attention keeps every score."""
    ranks = 2
    plans = [[*arguments, *LONGER, "--run.device", "neuron"] for arguments in list(TWINS[ranks].values())[:2]]
    environment = simulated_neuron.environment(tmp_path)
    for plan, (held, moved, _, record) in zip(plans, measured(plans, ranks, tmp_path, environment=environment), strict=True):
        found = rehearsed(*plan, attention="math")
        assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == held, plan
        assert by_kind(found) == moved, plan
        if plan is plans[0]:  # the device's peak is that of the whole process
            assert found.peak.total_bytes == pytest.approx(record["memory"]["peak_allocated_bytes"], rel=0.001), plan


def by_kind(found: Rehearsal) -> dict[str, tuple[float, float]]:
    """Number and bytes of the messages of each kind, whatever their group: a profile does not tell groups apart."""
    counts, sizes = Counter[str](), Counter[str]()
    for traffic in found.collectives:
        counts[traffic.kind] += traffic.count
        sizes[traffic.kind] += traffic.bytes
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


WIDTHS = {"float": 4, "c10::BFloat16": 2, "long": 8, "long int": 8}


def messages(events: list[dict]) -> dict[str, tuple[int, int]]:
    """Number and bytes of the messages in a profile, by kind: of each the larger of its input and its output."""
    counts, sizes = Counter[str](), Counter[str]()
    for event in events:
        name, args = event.get("name"), event.get("args", {})
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            kind = "all-gather" if "gather" in name else "reduce-scatter"
            size = max(math.prod(dims) for dims in args["Input Dims"][:2])
        elif name == "_c10d_functional::all_gather_into_tensor":
            kind, size = "all-gather", math.prod(args["Input Dims"][0]) * int(args["Concrete Inputs"][1])
        elif name == "_c10d_functional::reduce_scatter_tensor":
            kind, size = "reduce-scatter", math.prod(args["Input Dims"][0])
        elif name == "_c10d_functional::all_reduce":
            kind, size = "all-reduce", math.prod(args["Input Dims"][0])
        else:
            continue
        counts[kind] += 1
        sizes[kind] += size * WIDTHS[args["Input type"][0]]
    return {kind: (counts[kind], sizes[kind]) for kind in counts}


def highest(events: list[dict]) -> int:
    """The most bytes allocated in a step above what was there when the profile began.

    Of several steps the least: gloo's threads hold on to a message's tensors for as long as it takes them to get the processor.
    """
    ends = sorted(event["ts"] for event in events if event.get("name") == "Optimizer.step#AdamW.step")
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    now, tops = 0, [0] * (len(ends) + 1)
    for when, change in changes:
        now += change
        step = bisect.bisect(ends, when)
        tops[step] = max(tops[step], now)
    assert len(ends) == PROFILED
    return min(tops[:PROFILED])
