"""The stand-in for `neuron`, and the story of a first step told on it. Nothing here shows that anything runs on Trainium."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import simulated_neuron
from tests.ranks import ROOT, Processes

TWIN = ["qwen3_8b_trn2", "--tiny", "--run.device", "neuron", "--parallel.tensor_parallel_degree", "1"]
TWIN += ["--training.dtype", "float32"]
SHORT = ["--training.steps", "3", "--optimizer.warmup_steps", "0", "--run.no_tensorboard", "--validation.every_steps", "0"]
COMPILED = ["--run.mode", "compile"]


def python(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", ["strictness", "training"])
def test_stand_in(name: str, tmp_path: Path):
    done = python(["-m", "tests.simulated_neuron.checks", name], simulated_neuron.environment(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_its_gate_there_is_no_device(tmp_path: Path):
    environment = simulated_neuron.environment(tmp_path)
    del environment["FIRSTSTEP_SIMULATED_NEURON"]
    done = python(
        ["-c", "import torch; print(hasattr(torch, 'neuron'), torch._C._get_privateuse1_backend_name())"], environment
    )
    assert done.stdout.split() == ["False", "privateuseone"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "settings", [{}, {"TOUCH_FIRST": "1"}, {"BIND_DEVICE": "1"}], ids=["collectives", "touched first", "bound to a device"]
)
def test_two_ranks(settings: dict[str, str], tmp_path: Path):
    with Processes(
        ["-m", "tests.simulated_neuron.checks", "collectives"], 2, simulated_neuron.environment(tmp_path, **settings)
    ) as ranks:
        for code, output in ranks.finish(120):
            assert code == 0, output[-3000:]


# --- the story of the first step -------------------------------------------------------------------------------------------


class Story:
    """Runs of one recipe that share a cache, or have one each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.number = 0

    def train(self, world_size: int, *arguments: str, program: str | None = None, **settings: str):
        """Train, and return exit codes, outputs and the record."""
        self.number += 1
        runs = self.folder / f"runs{self.number}"
        command = ["-c", program] if program else ["-m", "tests.simulated_neuron.train"]
        environment = simulated_neuron.environment(self.folder, **settings)
        arguments = (*TWIN, *SHORT, *arguments, "--run.output_dir", str(runs))
        with Processes([*command, *arguments], world_size, environment) as ranks:
            finished = ranks.finish(240)
        records = list(runs.glob("*/record.json"))
        record = json.loads(records[0].read_text()) if records else None
        return [code for code, _ in finished], [output for _, output in finished], record

    def neffs(self) -> list[Path]:
        return sorted(self.folder.glob("**/*.neff"))


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_b1_b2_cold_then_warm_then_damaged(story: Story):
    """A warm start compiles nothing and still waits: tracing is not cached, and both first steps are in the records."""
    codes, outputs, record = story.train(1, *COMPILED, fallback_ops="aten::index_select aten::nothing")
    assert codes == [0], outputs
    assert record["compile"]["cache"]["state"] == "cold" and record["compile"]["cache"]["hits"] == 0
    assert record["timing"]["first_step_seconds"] > record["compile"]["trace_seconds"] > 0
    assert record["compile"]["cache"]["after"]["files"] == len(story.neffs()) > 0
    assert record["compile"]["graphs"] == 2 and record["compile"]["backend"] == "neuron"
    assert record["fallbacks"] == {"aten::index_select": None}, "of those that have run"
    assert record["environment"]["device_facts"]["torch_neuronx"] == "2.13.3.0"
    assert record["environment"]["device_facts"]["chip"] == "Trainium2"

    _, _, record = story.train(1, *COMPILED)
    assert record["compile"]["cache"]["state"] == "warm" and record["compile"]["cache"]["misses"] == 0
    assert record["timing"]["first_step_seconds"] > record["compile"]["trace_seconds"] > 0

    story.neffs()[0].write_bytes(b"")
    _, _, record = story.train(1, *COMPILED)
    assert record["compile"]["cache"]["state"] == "partial" and record["compile"]["cache"]["misses"] == 1
    assert story.neffs()[0].stat().st_size > 0, "compiled again"


def test_eager_compiles_each_operator_once(story: Story):
    _, _, cold = story.train(1)
    _, _, warm = story.train(1)
    assert (cold["compile"]["cache"]["state"], warm["compile"]["cache"]["state"]) == ("cold", "warm")
    assert cold["compile"]["cache"]["misses"] == warm["compile"]["cache"]["hits"] > 50


@pytest.mark.distributed
def test_b4_two_ranks_compile_each_graph_once(story: Story):
    codes, outputs, record = story.train(2, *COMPILED)
    assert codes == [0, 0], outputs
    assert record["compile"]["cache"]["state"] == "cold", "what the other rank has just written is no hit of a warm cache"
    assert record["compile"]["rank_dependent_graphs"] == []
    graphs = [neff for neff in story.neffs() if not neff.read_text().startswith("eager")]
    assert len(graphs) == record["compile"]["graphs"] == 2
    assert "this device's collectives keep" in outputs[0]
    _, _, record = story.train(2, *COMPILED)
    assert record["compile"]["cache"]["state"] == "warm"


RANK_IN_A_GRAPH = (
    "import os, sys\n"
    "from models.qwen3.model import Block\n"
    "from tests.simulated_neuron.train import main\n"
    "forward, shift = Block.forward, 1e-9 * int(os.environ['RANK'])\n"
    "Block.forward = lambda self, *inputs: forward(self, *inputs) + shift\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


@pytest.mark.distributed
def test_b5_a_graph_with_a_rank_in_it_is_flagged(story: Story):
    codes, outputs, record = story.train(2, *COMPILED, program=RANK_IN_A_GRAPH)
    assert codes == [0, 0], outputs
    assert len(record["compile"]["rank_dependent_graphs"]) == 2, "the forward graphs; the backward does not see the constant"
    assert "warning: 2 compiled graphs are rank-dependent" in outputs[0]


OWN_CACHE = (
    "import os, sys\n"
    "os.environ['TORCH_NEURONX_NEFF_CACHE_DIR'] += os.environ.get('RANK', '0')\n"
    "from tests.simulated_neuron.train import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


@pytest.mark.distributed
def test_b6_one_rank_has_a_filled_cache_and_waits_for_the_other(story: Story):
    """Two caches; the first run fills both, and rank 1's is then emptied."""
    codes, outputs, record = story.train(2, *COMPILED, program=OWN_CACHE)
    assert codes == [0, 0], outputs
    assert record["compile"]["cache"]["state"] == "cold"
    for neff in story.folder.glob("neff_cache1/**/*.neff"):
        neff.unlink()
    codes, outputs, record = story.train(2, *COMPILED, program=OWN_CACHE, compile_seconds="1")
    assert codes == [0, 0], outputs
    assert record["compile"]["cache"]["state"] == "partial"
    assert record["timing"]["slowest_rank"] == 1, "the one that compiled"
    ranks = record["timing"]["ranks"]
    assert ranks[0]["cache_misses"] == 0 and ranks[1]["cache_hits"] == 0
    assert "slowest rank: 1" in outputs[0]


@pytest.mark.distributed
def test_b3_b16_a_long_compile_is_waited_for_with_heartbeats(story: Story):
    settings = {"compile_seconds_rank": "1:4"}
    codes, outputs, record = story.train(
        2, *COMPILED, "--comm.heartbeat_seconds", "1", "--comm.first_step_timeout_seconds", "120", program=OWN_CACHE, **settings
    )
    assert codes == [0, 0], outputs
    beats = re.findall(r"^first step: \d+ s.*$", outputs[0], re.MULTILINE)
    assert len(beats) >= 2, outputs[0]
    assert any("rank 1" in beat and "compiling" in beat and "neuronx-cc, pid" in beat for beat in beats), beats
    assert record["timing"]["first_step_seconds"] > 4 and record["compile"]["cache"]["state"] == "cold"


@pytest.mark.distributed
def test_b3_e18_a_compile_that_outlasts_the_time_out_is_named(story: Story):
    settings = {"compile_seconds_rank": "1:60"}
    codes, outputs, record = story.train(2, *COMPILED, "--comm.first_step_timeout_seconds", "12", program=OWN_CACHE, **settings)
    assert codes == [1, 1], outputs
    for output in outputs:
        assert "the limit is 12 s (comm.first_step_timeout_seconds): waiting for rank 1 (compiling" in output, output[-2000:]
    assert record["status"] == "failed" and "waiting for rank 1 (compiling" in record["cause"]


@pytest.mark.distributed
def test_b15_a_compiler_that_fails_on_one_rank_is_named_on_all(story: Story):
    codes, outputs, record = story.train(2, *COMPILED, program=OWN_CACHE, compiler_exit="1:70")
    assert codes == [1, 1], outputs
    assert "rank 1 failed in step 1, forward" in outputs[0] and "neuronx-cc exited with 70" in outputs[0], outputs[0][-2000:]
    assert "its log is" in outputs[0]
    assert record["status"] == "failed" and "neuronx-cc exited with 70" in record["cause"]
