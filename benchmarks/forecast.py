"""How well preflight forecasts a cold compiled first step on the CPU: three recorded runs, then ten edits.

    python -m benchmarks.forecast

Every run is a process of `train.py debug` in compile mode with an empty Inductor cache of its own. Each edit is forecast from
the three runs alone, and then run.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from preflight import forecast
from preflight.outlook import history, model_flops
from preflight.stored import parse, take

ROOT = Path(__file__).resolve().parent.parent
BASE = ["debug", "--run.mode", "compile", "--run.no_tensorboard", "--training.steps", "2", "--optimizer.warmup_steps", "0"]
BASE += ["--validation.every_steps", "0"]
RECORDED: dict[str, list[str]] = {
    "as it is": [],
    "as it is, again": [],
    "a wider feed-forward network": ["--model.ffn_dim", "1536"],
}
EDITS: dict[str, list[str]] = {
    "twice the sequence": ["--training.seq_len", "512"],
    "half the sequence": ["--training.seq_len", "128"],
    "twice the batch": ["--training.local_batch_size", "8"],
    "a narrower feed-forward network": ["--model.ffn_dim", "512"],
    "twice the depth": ["--model.num_layers", "8"],
    "bfloat16": ["--training.dtype", "bfloat16"],
    "selective checkpointing": ["--parallel.activation_checkpointing", "selective"],
    "full checkpointing": ["--parallel.activation_checkpointing", "full"],
    "documents apart": ["--data.isolate_documents"],
    "one graph of two blocks": ["--model.num_layers", "2", "--compile.region", "model"],
}


def run(arguments: list[str], folder: Path) -> dict:
    """Train with an empty cache and return the record."""
    before = set(folder.glob("*/record.json"))
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "train.py", *BASE, *arguments, "--run.output_dir", str(folder)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (path,) = set(folder.glob("*/record.json")) - before
    return json.loads(path.read_text())


def main() -> None:
    """Print one line for each run and the number of forecasts within 30 %."""
    import torch

    print(f"python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'edit':<34}{'forecast':>9}{'interval':>16}{'measured':>10}{'error':>8}")
    within = 0
    with tempfile.TemporaryDirectory() as recorded, tempfile.TemporaryDirectory() as others:
        for name, arguments in RECORDED.items():
            seconds = run(arguments, Path(recorded))["timing"]["first_step_seconds"]
            print(f"{name:<34}{'':>25}{seconds:>8.1f} s", flush=True)
        runs, _ = history(parse([*BASE, "--run.output_dir", recorded]))
        assert len(runs) == len(RECORDED)
        for name, arguments in EDITS.items():
            recipe = parse([*BASE, *arguments])
            graphs = take(recipe).inventory.graphs
            said = forecast.first_step(graphs, model_flops(recipe), runs, "compile", forecast.COLD)
            assert said.seconds is not None
            measured = run(arguments, Path(others))["timing"]["first_step_seconds"]
            error = said.seconds / measured - 1
            within += abs(error) <= 0.3
            interval = f"{said.low:.1f} to {said.high:.1f}"
            print(f"{name:<34}{said.seconds:>7.1f} s{interval:>16}{measured:>8.1f} s{error:>+8.0%}", flush=True)
    print(f"within 30 %: {within} of {len(EDITS)}")


if __name__ == "__main__":
    main()
