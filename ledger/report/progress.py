"""Sections on the steps: their time, what was learnt, and the time in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ledger.break_even import Pace, break_even, of_run
from ledger.report import chart
from ledger.report.chart import Line, Mark
from ledger.report.html import colour_of, details, figure, name_of, note, table
from ledger.runs import LedgerError, Run
from ledger.screen import amount


def steps(runs: Sequence[Run]) -> str:
    """Return the seconds per step over the steps, with late compiles and whatever else disturbed a window."""
    drawn, marks, disturbed, late = [], [], [], []
    for run in runs:
        name, colour = name_of(run, runs), colour_of(run, runs)
        windows = _windows(run)[1:]
        points = [(edge, _per_step(window)) for window in windows for edge in (window["first_step"], window["last_step"])]
        drawn.append(Line(name, points, colour))
        odd = [window for window in windows if window.get("disturbed_by")]
        if odd:
            dots = [(window["last_step"], _per_step(window)) for window in odd]
            drawn.append(Line(f"{name}, disturbed", dots, colour, dots=True))
        for window in odd:
            seconds = amount(_per_step(window), "s")
            disturbed.append([run.id, window["first_step"], window["last_step"], seconds, window["disturbed_by"]])
        for each in run.get("compile.late_compiles") or ():
            if isinstance(each, dict) and isinstance(each.get("step"), int):
                seconds = amount(each.get("seconds"), "s")
                marks.append(Mark(each["step"], f"late compile in step {each['step']}: {seconds}"))
                late.append([run.id, each["step"], seconds, each.get("function"), each.get("cause")])
    body = figure(chart.lines("Seconds per step after the first", drawn, "optimizer step", "seconds per step", marks))
    if not body:
        return note("n/a: no run has recorded a step after the first.")
    body += note("Without the first step. A dot is a window in which something else happened; it does not count as steady.")
    late_header = ["run", "step", "seconds", "function", "cause"]
    body += table(late_header, late, "Late compiles, the dotted red lines", (0, 3, 4)) or note("No late compiles.")
    header = ["run", "from step", "to step", "per step", "by"]
    return body + details("Disturbed windows as numbers", table(header, disturbed, text=(0, 4)))


def _windows(run: Run) -> list[dict[str, Any]]:
    return [window for window in run.get("timing.windows") or () if isinstance(window, dict) and window.get("seconds")]


def _per_step(window: dict[str, Any]) -> float:
    return window["seconds"] / (window["last_step"] - window["first_step"] + 1)


def learning(runs: Sequence[Run]) -> str:
    """Return losses and gradient norms by step, and the rounds of validation."""
    losses, norms, validation = [], [], []
    for run in runs:
        name, colour = name_of(run, runs), colour_of(run, runs)
        recorded = [step for step in run.steps() if isinstance(step.get("step"), int)]
        if recorded:
            losses.append(Line(name, _curve(recorded, "loss"), colour))
            norms.append(Line(name, _curve(recorded, "grad_norm"), colour))
        rounds = [each for each in run.get("quality.validation") or () if isinstance(each, dict)]
        if rounds:
            losses.append(Line(f"{name}, validation", _curve(rounds, "loss"), colour, dots=True))
        validation += [[run.id, each.get("step"), amount(each.get("loss")), amount(each.get("tokens"))] for each in rounds]
    body = figure(chart.lines("Loss by step", losses, "optimizer step", "loss, nats per token"))
    body += figure(chart.lines("Gradient norm before clipping, by step", norms, "optimizer step", "gradient norm", height=190))
    if not body:
        return note("n/a: no step was recorded.")
    odd = [run for run in runs if run.get("quality.non_finite_steps")]
    body += "".join(note(f"{run.id}: {run.get('quality.non_finite_steps')} steps were not finite.") for run in odd)
    return body + details("Validation as numbers", table(["run", "after step", "loss", "tokens"], validation))


def _curve(recorded: Sequence[dict[str, Any]], field: str) -> list[chart.Point]:
    """Return a field by step; a value that is missing or was not finite is a gap."""
    values = ((each["step"], each.get(field)) for each in recorded if isinstance(each.get("step"), int))
    return [(step, float(value) if isinstance(value, (int, float)) else math.nan) for step, value in values]


def total(runs: Sequence[Run]) -> str:
    """Return the seconds since the first batch was asked for, as measured and as the paces predict, and where they cross."""
    drawn, marks, notes = [], [], []
    paces: dict[str, Pace] = {}
    for run in runs:
        if points := _elapsed(run):
            drawn.append(Line(f"{name_of(run, runs)}, measured", points, colour_of(run, runs)))
        try:
            paces[run.id] = of_run(run)
        except LedgerError as error:
            notes.append(str(error))
    last = max((line.points[-1][0] for line in drawn), default=0)
    if len(paces) == len(runs) == 2:
        crossing, said = _crossing(runs, paces)
        notes.append(said)
        if crossing is not None:
            marks.append(Mark(crossing, f"step {crossing}: {said}"))
            last = max(last, round(crossing * 1.25))
    for run in runs:
        if (pace := paces.get(run.id)) is not None:
            ends = [(1, pace.total(1)), (last, pace.total(int(last)))]
            drawn.append(Line(f"{name_of(run, runs)}, first step + steady pace", ends, colour_of(run, runs), dashed=True))
    body = figure(chart.lines("Seconds since the first batch was asked for", drawn, "optimizer step", "seconds in all", marks))
    return body and body + "".join(map(note, notes))


def _crossing(runs: Sequence[Run], paces: dict[str, Pace]) -> tuple[int | None, str]:
    """Return the step from which on one of two runs is ahead, and that in a sentence."""
    a, b = runs
    try:
        found = break_even(paces[a.id], paces[b.id])
    except LedgerError as error:
        return None, str(error)
    names = {paces[run.id].name: name_of(run, runs) for run in runs}
    if found.crossing is None:
        return None, f"{names[found.winner(2).name]} is ahead at any number of steps."
    step = found.crossing.step
    ends = f"{found.earliest_step} to {'never' if found.latest_step is None else found.latest_step}"
    return step, f"{names[found.crossing.ahead]} is ahead from step {step:,} on (by the spread of the steps: {ends})."


def _elapsed(run: Run) -> list[chart.Point]:
    """Return the seconds since the loop asked for its first batch, at the end of each window, as they were measured."""
    first, windows = run.number("timing.first_step_seconds"), _windows(run)
    if first is None or not windows:
        return []
    seconds, points = first, [(windows[0]["last_step"], first)]
    for _, window in pairwise(windows):
        seconds += window["seconds"]
        points.append((window["last_step"], seconds))
    return points
