"""How long a checkpoint makes the loop wait: one run saves every few steps, and each save is held against the steps around it.

    python -m benchmarks.checkpoint_stall                        # debug, asynchronous and not
    python -m benchmarks.checkpoint_stall --recipe qwen3_0_6b --steps 24 --every 8

For each save: the seconds that the loop stood still for it, and by how much the steps were slower while a thread wrote, both
as a share of the time of the steps from one save to the next without it. The comparison is within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def measure(recipe: str, steps: int, every: int, asynchronous: bool, more: list[str]) -> dict[str, Any]:
    """Train once and return what its record says of its saves."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", recipe, "--training.steps", str(steps), "--run.log_every", "1"]
        command += ["--run.output_dir", folder, "--run.no_tensorboard", "--validation.every_steps", "0", *more]
        command += ["--checkpoint.every_steps", str(every), f"--checkpoint.{'' if asynchronous else 'no_'}asynchronous"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("*/record.json")
        record = json.loads(path.read_text())
    windows = [window for window in record["timing"]["windows"] if window["first_step"] > 1]
    quiet = [window["seconds"] for window in windows if window["disturbed_by"] is None]
    writing = [window["seconds"] for window in windows if window["disturbed_by"] == "saved"]
    saves = record["checkpoints"]["saves"]
    saves = saves[:-1] if len(saves) > 1 else saves  # the run waits for the last one, whatever it was asked
    step = statistics.median(quiet)
    waited = [save["waited_seconds"] for save in saves]
    slower = sum(seconds - step for seconds in writing)
    return {
        "recipe": recipe,
        "asynchronous": asynchronous,
        "bytes": saves[0]["bytes"],
        "saves": len(saves),
        "seconds_per_quiet_step": step,
        "steps_between_saves": every,
        "waited_seconds_median": statistics.median(waited),
        "waited_seconds_max": max(waited),
        "seconds_until_complete_median": statistics.median(save["seconds"] for save in saves),
        "waited_share": statistics.median(waited) / (every * step),
        "steps_while_writing": len(writing),
        "slower_share": slower / (len(saves) * every * step),
    }


def main() -> None:
    """Measure both kinds, interleaved, and print a table and the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="debug")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options, more = parser.parse_known_args()
    results = [
        measure(options.recipe, options.steps, options.every, asynchronous, more)
        for _ in range(options.rounds)
        for asynchronous in (True, False)
    ]
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| saves | bytes | quiet step | waited (median, max) | share of the steps | complete after | slower while writing |")
    print("|---|---|---|---|---|---|---|")
    for found in results:
        print(
            f"| {'asynchronous' if found['asynchronous'] else 'waited for'} | {found['bytes'] / 1e6:.0f} MB "
            f"| {found['seconds_per_quiet_step']:.3f} s "
            f"| {found['waited_seconds_median']:.3f}, {found['waited_seconds_max']:.3f} s "
            f"| {100 * found['waited_share']:.1f} % | {found['seconds_until_complete_median']:.2f} s "
            f"| {100 * found['slower_share']:.1f} % over {found['steps_while_writing']} steps |"
        )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
