"""Every recipe's twin trains on several ranks as on one: same losses, same gradient norms, whatever the layout."""

from __future__ import annotations

import jsonschema
import pytest

from tests import simulated_neuron
from tests.ranks import Trained, train
from tests.test_train import SCHEMA

TIED, UNTIED = "qwen3_0_6b", "qwen3_8b_trn2"
ALONE, TWO = "--parallel.tensor_parallel_degree 1", "--parallel.tensor_parallel_degree 2"  # as the recipe says: 4
NONE, SELECTIVE, FULL = (f"--parallel.activation_checkpointing {kind}" for kind in ("none", "selective", "full"))
SIMPLE, DDP = "--parallel.data_parallel_wrapper simple_fsdp", "--parallel.data_parallel_wrapper ddp"
HSDP = "--parallel.data_parallel_replicate_degree 2"
EAGER, COMPILED = "--run.mode eager", "--run.mode compile --compile.backend aot_eager"
INDUCTOR = "--run.mode compile"
BOTH_SAMPLES = "--training.local_batch_size 2"  # no accumulation on two data-parallel ranks

LAYOUTS = {
    1: [
        f"debug {ALONE} {EAGER} {NONE}",
        f"{TIED} {ALONE} {COMPILED}",
        f"{UNTIED} {ALONE} {EAGER}",
        f"qwen3_32b_trn2_compiled {ALONE} {COMPILED} {FULL}",
    ],
    2: [
        f"debug {ALONE} {EAGER}",
        f"{TIED} {ALONE} {COMPILED} {SELECTIVE} {BOTH_SAMPLES}",
        f"{TIED} {TWO} {EAGER} {FULL}",
        f"{TIED} {ALONE} {DDP} {EAGER} {NONE} {BOTH_SAMPLES}",
        f"{TIED} {ALONE} {SIMPLE} {EAGER} {SELECTIVE}",
        f"{UNTIED} {ALONE} {EAGER} {SELECTIVE}",
        f"{UNTIED} {ALONE} {DDP} {COMPILED} {FULL}",
        f"{UNTIED} {ALONE} {SIMPLE} {COMPILED} {SELECTIVE} --compile.region model",
        f"{UNTIED} {TWO} {COMPILED} {NONE}",
        f"qwen3_32b_trn2_eager {TWO} {EAGER}",
        f"qwen3_32b_h200x8 {COMPILED}",
        f"{UNTIED} {TWO} {INDUCTOR} {SELECTIVE}",
    ],
    4: [
        f"{TIED} {ALONE} {COMPILED} {NONE}",
        f"{TIED} {ALONE} {HSDP} {EAGER} {FULL} {BOTH_SAMPLES} --training.global_batch_size 8",
        f"{TIED} {TWO} {COMPILED} {SELECTIVE} {BOTH_SAMPLES}",
        f"{UNTIED} {ALONE} {HSDP} {COMPILED} {NONE}",
        f"{UNTIED} {ALONE} {HSDP} {SIMPLE} {COMPILED} {SELECTIVE}",
        f"{UNTIED} {TWO} {EAGER} {NONE} --parallel.no_reshard_after_forward --parallel.prefetch_blocks 1",
        f"{UNTIED} {TWO} {SIMPLE} {COMPILED} {FULL}",
        f"qwen3_32b_trn2_eager {EAGER}",
        f"qwen3_32b_trn2_compiled {COMPILED}",
        f"qwen3_32b_h200x8 {HSDP} {COMPILED} {FULL}",
    ],
}
TOLERANCE = 1e-5


def arguments(layout: str, device: str) -> list[str]:
    recipe, *rest = layout.split()
    batch = [] if "--training.global_batch_size" in rest else ["--training.global_batch_size", "4"]
    common = ["--tiny", "--training.dtype", "float32", "--run.log_every", "5", "--run.no_tensorboard"]
    return [recipe, *common, *batch, "--run.device", device, *rest]


def on_the_stand_in(layout: str) -> str:
    """There the device has a compile backend of its own."""
    return layout.replace(" --compile.backend aot_eager", "")


def deviation(run: Trained, reference: Trained) -> tuple[float, float]:
    """The largest relative differences of losses and of gradient norms over ten steps."""
    assert len(run.steps) == len(reference.steps) == 10
    pairs = (run.losses, reference.losses), (run.grad_norms, reference.grad_norms)
    return tuple(max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs)  # type: ignore


def kind(layout: str) -> str:
    """What decides the numbers: the network and the samples of a step. Not the recipe, and not the layout."""
    return ("tied" if layout.startswith(TIED) else "untied") + (" 8" if "global_batch_size 8" in layout else "")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """One process on the CPU, eager, nothing recomputed."""
    layouts = [
        f"{TIED} {ALONE} {EAGER} {NONE}",
        f"{TIED} {ALONE} {EAGER} {NONE} --training.global_batch_size 8",
        f"{UNTIED} {ALONE} {EAGER} {NONE}",
    ]
    runs = train([arguments(layout, "cpu") for layout in layouts], 1, tmp_path_factory.mktemp("references"))
    return {kind(layout): run for layout, run in zip(layouts, runs, strict=True)}


def check(layouts: list[str], references: dict[str, Trained], runs: list[Trained], world_size: int) -> None:
    """Hold each run against one process, and its record against the schema."""
    problems = []
    for layout, run in zip(layouts, runs, strict=True):
        assert run.codes == [0] * world_size, layout
        jsonschema.validate(run.record, SCHEMA)
        loss, norm = deviation(run, references[kind(layout)])
        if loss > TOLERANCE or norm > TOLERANCE:
            problems.append(f"{layout}: losses differ by {loss:.1e}, gradient norms by {norm:.1e}")
        degrees = run.record["work"]["layout"]
        assert (
            world_size
            == (
                degrees["data_parallel_replicate_degree"]
                * degrees["data_parallel_shard_degree"]
                * degrees["tensor_parallel_degree"]
            )
            or degrees["data_parallel_wrapper"] == "ddp"
        )
        assert [rank["rank"] for rank in run.record["timing"]["ranks"]] == list(range(world_size))
    assert problems == []


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_d16_every_layout_trains_like_one_process(world_size, references, tmp_path):
    layouts = LAYOUTS[world_size]
    runs = train([arguments(layout, "cpu") for layout in layouts], world_size, tmp_path)
    check(layouts, references, runs, world_size)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_trains_like_one_process_on_the_stand_in(world_size, references, tmp_path):
    layouts = [on_the_stand_in(layout) for layout in LAYOUTS[world_size] if INDUCTOR not in layout or COMPILED in layout]
    environment = simulated_neuron.environment(tmp_path)
    module = "tests.simulated_neuron.train"
    runs = train(
        [arguments(layout, "neuron") for layout in layouts], world_size, tmp_path, environment=environment, module=module
    )
    check(layouts, references, runs, world_size)
    for layout, run in zip(layouts, runs, strict=True):
        assert run.record["environment"]["device"] == "neuron"
        assert run.record["fallbacks"] == {}
        if run.record["compile"]["mode"] == "compile":
            assert run.record["compile"]["backend"] == "neuron"
            assert run.record["compile"]["rank_dependent_graphs"] == [], (layout, run.record["id"])
