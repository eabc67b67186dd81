"""The first step in compile mode: how it grows with depth, what compiling block by block saves, what a warm cache saves.

    python -m benchmarks.compile_wait

Every line is one process of `train.py` with an empty Inductor cache of its own, except `warm`, which has the one of the line
before. The figures are `first_step_seconds` and its compile seconds from the run's record.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ("--training.seq_len", "512", "--training.steps", "2", "--optimizer.warmup_steps", "0", "--validation.every_steps", "0")


def first_step(layers: int, region: str, cache: Path) -> dict:
    """Run two steps in compile mode and return the record."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "debug", *WORK, "--run.mode", "compile", "--compile.region", region]
        command += ["--model.num_layers", str(layers), "--run.no_tensorboard", "--run.output_dir", folder]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        (record,) = Path(folder).glob("*/record.json")
        return json.loads(record.read_text())


def main() -> None:
    """Measure every line once and print the ratios that matter."""
    import torch

    threads = torch.get_num_threads()
    print(f"python {platform.python_version()}, torch {torch.__version__}, {threads} threads, {platform.machine()}")
    print(f"{'layers':>6}  {'region':<6}  {'cache':<5}  {'first step':>10}  {'compiling':>9}  {'graphs':>6}")
    seconds = {}
    with tempfile.TemporaryDirectory() as caches:
        for layers, region, repeat in ((8, "block", 2), (24, "block", 2), (24, "model", 1)):
            cache = Path(caches, f"{layers}-{region}")
            for _ in range(repeat):
                record = first_step(layers, region, cache)
                state, compiled = record["compile"]["cache"]["state"], record["compile"]
                seconds[layers, region, state] = taken = record["timing"]["first_step_seconds"]
                print(
                    f"{layers:>6}  {region:<6}  {state:<5}  {taken:>8.2f} s  {compiled['compile_seconds']:>7.2f} s  "
                    f"{compiled['graphs']:>6}",
                    flush=True,
                )
    cold8, cold24 = seconds[8, "block", "cold"], seconds[24, "block", "cold"]
    print(f"24 layers / 8 layers, by block, cold:        {cold24 / cold8:.2f}")
    print(f"by block / whole model, 24 layers, cold:     {cold24 / seconds[24, 'model', 'cold']:.2f}")
    print(f"warm / cold, 8 layers, by block:             {seconds[8, 'block', 'warm'] / cold8:.2f}")
    print(f"warm / cold, 24 layers, by block:            {seconds[24, 'block', 'warm'] / cold24:.2f}")


if __name__ == "__main__":
    main()
