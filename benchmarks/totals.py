"""What breakeven predicts for N steps, against really running N steps, in both modes.

    python -m benchmarks.totals --repeats 2 --output FILE.json

The paces come from runs of their own, of 60 steps. Runs go one after the other, modes side by side; caches are warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ledger.break_even import of_run
from ledger.runs import Run, read_run

ROOT = Path(__file__).resolve().parent.parent
MODES = ("eager", "compile")
COUNTS = (20, 100, 1000)
PACE_STEPS = 60
WORK = ["debug", "--training.seq_len", "64", "--training.local_batch_size", "2", "--training.global_batch_size", "2"]
WORK += ["--validation.every_steps", "0", "--run.no_tensorboard", "--optimizer.warmup_steps", "10"]


def run(mode: str, steps: int, folder: Path) -> Run:
    """Train in a process of its own."""
    before = set(folder.glob("2*"))
    command = [sys.executable, "train.py", *WORK, "--run.mode", mode, "--training.steps", str(steps)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    command += ["--run.output_dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    (new,) = set(folder.glob("2*")) - before
    return read_run(new)


def seconds(done: Run) -> float:
    """From the loop asking for its first batch to the end of the last step, as measured."""
    first = done.number("timing.first_step_seconds")
    assert first is not None
    return first + sum(window["seconds"] for window in done.get("timing.windows")[1:])


def main() -> int:
    """Run all of it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mode in MODES:
            run(mode, 10, folder)  # fills the caches
        for repeat in range(options.repeats):
            modes = MODES if repeat % 2 == 0 else MODES[::-1]
            paces = {mode: of_run(run(mode, PACE_STEPS, folder)) for mode in modes}
            for count in COUNTS:
                for mode in modes:
                    predicted, real = paces[mode].total(count), seconds(run(mode, count, folder))
                    found.setdefault((mode, count), []).append((predicted, real))
                    print(f"{repeat + 1} {mode} {count}: predicted {predicted:.2f} s, really {real:.2f} s", flush=True)
    print("\nmode     steps  predicted    really  off (medians)   off (each repeat)")
    rows = []
    for (mode, count), pairs in found.items():
        predicted, real = (statistics.median(values) for values in zip(*pairs, strict=True))
        each = ", ".join(f"{100 * (p / r - 1):+.1f} %" for p, r in pairs)
        print(f"{mode:<8} {count:>5}  {predicted:>8.2f} s {real:>8.2f} s  {100 * (predicted / real - 1):>+11.1f} %   {each}")
        rows.append({"mode": mode, "steps": count, "pairs": pairs})
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
