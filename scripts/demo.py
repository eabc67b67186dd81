"""Train recipe `debug` eagerly and compiled, and say which mode is ahead after how many steps.

python -m scripts.demo
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from training.console import percent, seconds, table
from training.metrics import break_even

ROOT = Path(__file__).resolve().parent.parent


def run(mode: str) -> dict[str, Any]:
    """Train recipe debug in `mode` and return its record."""
    print(f"\n$ python train.py debug --run.mode {mode}", flush=True)
    before = set(ROOT.glob("runs/*/record.json"))
    finished = subprocess.run([sys.executable, "train.py", "debug", "--run.mode", mode], cwd=ROOT)
    if finished.returncode:
        sys.exit(finished.returncode)
    (made,) = set(ROOT.glob("runs/*/record.json")) - before
    return json.loads(made.read_text())


def row(record: dict[str, Any]) -> tuple[str, ...]:
    """Return one line of the table."""
    timing, quality = record["timing"], record["quality"]
    steady = timing["steady"]
    entry = next((entry for entry in timing["mfu"] if entry["numerator"] == "torchtitan"), None)
    share = "n/a" if entry is None else f"{percent(entry['mfu'])} of {entry['peak']['flops'] / 1e9:,.0f} GFLOP/s"
    return (
        record["compile"]["mode"],
        seconds(timing["first_step_seconds"]),
        seconds(timing["time_to_first_step_seconds"]),
        "n/a" if steady is None else f"{steady['tokens_per_second']:,.0f}",
        share,
        f"{quality['loss_first']:.2f} -> {quality['loss_last_window']:.2f}",
        record["compile"]["cache"]["state"] or "not used",
    )


def verdict(eager: dict[str, Any], compiled: dict[str, Any]) -> str:
    """Say which mode is ahead after how many steps, under total(N) = first + (N - 1) x step."""
    if not (eager["timing"]["steady"] and compiled["timing"]["steady"]):
        return "Which mode is ahead: n/a, one of them has no steady speed."
    crossing = break_even(
        eager["timing"]["first_step_seconds"],
        eager["timing"]["steady"]["seconds_per_step_median"],
        compiled["timing"]["first_step_seconds"],
        compiled["timing"]["steady"]["seconds_per_step_median"],
    )
    if crossing is None:
        return "Eager is ahead at any length: here a compiled step is not faster."
    if crossing.ahead_from_step == 1:
        return "Compiled is ahead from the first step."
    return f"Eager is ahead up to step {crossing.ahead_from_step - 1:,}; compiled from step {crossing.ahead_from_step:,} on."


def main() -> None:
    """Run both modes and print the table."""
    eager, compiled = run("eager"), run("compile")
    columns = (
        "mode",
        "first step",
        "from process start",
        "steady tokens/s",
        "MFU (torchtitan)",
        "loss first -> last",
        "compile cache",
    )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print()
    console.print(table("debug: 8.4M parameters, float32", columns, [row(eager), row(compiled)]))
    entry = next(iter(compiled["timing"]["mfu"]), None)
    if entry:
        console.print(f"Peak: {entry['peak']['source']}.")
    console.print(verdict(eager, compiled))


if __name__ == "__main__":
    main()
