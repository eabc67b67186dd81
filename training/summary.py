"""The last lines on the screen: a run in a few numbers, out of its own record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.console import gigabytes, percent, seconds


def summary(record: Mapping[str, Any], peak_bytes: int | None) -> list[tuple[str, str]]:
    """Return name and text of each line.

    Args:
        record: with the sections timing, compile, quality and checkpoints.
        peak_bytes: most memory that was allocated on this rank's device. None: unknown.
    """
    timing, compiled, quality = (record[name] for name in ("timing", "compile", "quality"))
    whole = seconds(timing["time_to_first_step_seconds"])
    rows = [("first step", f"{seconds(timing['first_step_seconds'])} ({whole} after process start)")]
    rows.append(("steady", _steady(timing)))
    for entry in timing["mfu"]:
        if entry["numerator"] == "torchtitan":
            peak = entry["peak"]
            denominator = f"{peak['flops'] / 1e12:.4g} TFLOP/s {peak['dtype']} per {peak['per']}, {peak['source']}"
            rows.append(("MFU", f"{percent(entry['mfu'])} of {denominator}"))
    if not timing["mfu"]:
        rows.append(("MFU", "n/a: no known peak for this device; name the chip with --run.chip"))
    if compiled["mode"] == "compile":
        rows.append(("compile", _compile(compiled)))
    rows.append(("memory", f"peak {gigabytes(peak_bytes)}"))
    if quality["loss_last"] is not None:
        rows.append(("loss", f"{quality['loss_first']:.4f} -> {quality['loss_last_window']:.4f} (mean of the last window)"))
    if saves := record["checkpoints"]["saves"]:
        rows.append(("checkpoints", _checkpoints(saves, record["checkpoints"]["folder"])))
    return rows


def _steady(timing: Mapping[str, Any]) -> str:
    steady = timing["steady"]
    if steady is None:
        return (
            "not quoted: a deterministic run" if timing["deterministic"] else "n/a: no undisturbed window after the first step"
        )
    spread = f"{steady['seconds_per_step_min']:.3f} to {steady['seconds_per_step_max']:.3f} over {steady['windows']} windows"
    return f"{steady['tokens_per_second']:,.0f} tokens/s, {steady['seconds_per_step_median']:.3f} s/step ({spread})"


def _compile(compiled: Mapping[str, Any]) -> str:
    breaks, late = sum(compiled["graph_breaks"].values()), len(compiled["late_compiles"])
    cost = f"{compiled['graphs']} graphs, {compiled['compile_seconds']:.2f} s (tracing {compiled['trace_seconds']:.2f} s)"
    return f"{cost}, cache {compiled['cache']['state']}, {breaks} graph breaks, {late} late"


def _checkpoints(saves: list[dict[str, Any]], folder: str) -> str:
    complete = [save for save in saves if save["error"] is None]
    waited = sum(save["waited_seconds"] for save in saves)
    failed = f", {len(saves) - len(complete)} failed" if len(complete) < len(saves) else ""
    return f"{len(complete)} saved{failed}, {waited:.2f} s waited, in {folder}"
