"""Sections on the wait: the first step by phase and rank, what was compiled, and what did not fit the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ledger.report import chart
from ledger.report.chart import Bar, Part
from ledger.report.html import details, figure, name_of, note, table
from ledger.runs import Run
from ledger.screen import amount
from training.timeline import PHASES

_MOST_RANKS = 64
"""Bars of a chart; of more ranks the slowest are shown."""


def first_step(runs: Sequence[Run]) -> str:
    """Return a bar per run, and per rank, from the creation of the process to the end of the first step."""
    drawn = []
    for run in runs:
        phases = _phases(run)
        compiling = {phase["phase"]: phase.get("compile_seconds") or 0.0 for phase in phases}
        drawn.append(Bar(name_of(run, runs), _parts({phase["phase"]: phase["seconds"] for phase in phases}, compiling)))
    unit = "seconds since the process was created"
    body = figure(chart.bars("Seconds of each phase until the end of the first step", drawn, unit, "s"))
    if not body:
        return note("n/a: no run has finished a first step.")
    body += note("Rank 0 of each run. The pale end of a part is compilation, tracing included.")
    for run in runs:
        ranks = [
            rank for rank in run.get("timing.ranks") or () if isinstance(rank, dict) and isinstance(rank.get("phases"), dict)
        ]
        if len(ranks) > 1:
            body += _ranks(run, ranks)
        rows = (
            [
                phase["phase"].replace("_", " "),
                amount(phase["seconds"], "s"),
                amount(phase.get("compile_seconds"), "s"),
                amount(phase.get("trace_seconds"), "s"),
                amount(phase.get("cache_hits")),
                amount(phase.get("cache_misses")),
            ]
            for phase in _phases(run)
        )
        header = ["phase", "seconds", "compiling", "of it tracing", "cache hits", "misses"]
        body += details(f"Phases of {run.id} as numbers", table(header, rows))
    return body


def _phases(run: Run) -> list[dict[str, Any]]:
    return [
        phase for phase in run.get("timing.phases") or () if isinstance(phase, dict) and isinstance(phase.get("seconds"), float)
    ]


def _parts(seconds: dict[str, float], compiling: dict[str, float]) -> list[Part]:
    order = {phase: number for number, phase in enumerate(PHASES)}
    known = sorted((name for name in seconds if name in order), key=lambda name: order[name])
    return [Part(name.replace("_", " "), seconds[name], order[name], compiling.get(name, 0.0)) for name in known]


def _ranks(run: Run, ranks: list[dict[str, Any]]) -> str:
    slowest = sorted(ranks, key=lambda rank: -(rank.get("time_to_first_step_seconds") or 0.0))[:_MOST_RANKS]
    drawn = [Bar(f"rank {rank['rank']}", _parts(rank["phases"], {})) for rank in sorted(slowest, key=lambda rank: rank["rank"])]
    title = f"Every rank of {run.id}" if len(slowest) == len(ranks) else f"The slowest {len(slowest)} of {len(ranks)} ranks"
    said = f"{title}. The slowest of all: rank {run.get('timing.slowest_rank')}, which the others waited for."
    return note(said) + figure(chart.bars(title, drawn, "seconds since the process was created", "s"))


def compiling(runs: Sequence[Run]) -> str:
    """Return what was compiled, how long it took, and what the cache held."""
    rows = {
        "mode": lambda run: run.text("compile.mode") or "n/a",
        "graphs": lambda run: amount(run.get("compile.graphs")),
        "seconds": lambda run: amount(run.number("compile.compile_seconds"), "s"),
        "of them tracing": lambda run: amount(run.number("compile.trace_seconds"), "s"),
        "late compiles": lambda run: amount(_length(run.get("compile.late_compiles"))),
        "their seconds": lambda run: amount(run.number("compile.late_compile_seconds"), "s"),
        "cache": lambda run: run.text("compile.cache.state") or "not asked",
        "hits": lambda run: amount(run.get("compile.cache.hits")),
        "misses": lambda run: amount(run.get("compile.cache.misses")),
        "entries before": lambda run: amount(run.get("compile.cache.before.files")),
        "entries after": lambda run: amount(run.get("compile.cache.after.files")),
        "size after": lambda run: amount(run.get("compile.cache.after.size_bytes"), "bytes"),
        "folder": lambda run: run.text("compile.cache.after.directory") or "n/a",
    }
    figures = ([name, *(look(run) for run in runs)] for name, look in rows.items())
    body = table(["", *(run.id for run in runs)], figures, text=range(len(runs) + 1))
    for run in runs:
        found = [each for each in run.get("compile.compilations") or () if isinstance(each, dict)]
        rows_of_graphs = (
            [each.get("function"), each.get("direction"), amount(each.get("seconds"), "s"), each.get("cause")] for each in found
        )
        header = ["graph", "direction", "seconds", "cause"]
        body += details(f"{len(found)} graphs of the first step of {run.id}", table(header, rows_of_graphs, text=(0, 1, 3)))
        breaks = run.get("compile.graph_breaks")
        if isinstance(breaks, dict) and breaks:
            body += table(["graph break", "times"], breaks.items(), run.id)
    return body


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict)) else None


def fallbacks(runs: Sequence[Run]) -> str:
    """Return the operators that the device left to the host."""
    rows = []
    for run in runs:
        found = run.get("fallbacks")
        if isinstance(found, dict):
            rows += [[run.id, name, amount(times)] for name, times in found.items()] or [[run.id, "none", ""]]
        else:
            rows.append([run.id, "n/a: the device cannot tell", ""])
    return table(["run", "operator", "times"], rows, text=(0, 1))


def memory(runs: Sequence[Run]) -> str:
    """Return the peak of each run beside what there was."""
    drawn, rows = [], []
    for run in runs:
        peak, total = run.number("memory.peak_allocated_bytes"), run.number("memory.total_bytes")
        rows.append([run.id, *(amount(value, "bytes") for value in (peak, run.number("memory.reserved_bytes"), total))])
        if peak is not None:
            free = [] if total is None or total <= peak else [Part("free", (total - peak) / 1e9, 0)]
            drawn.append(Bar(name_of(run, runs), [Part("peak", peak / 1e9, 1), *free]))
    return figure(chart.bars("Peak memory of rank 0", drawn, "GB", "GB")) + table(["run", "peak", "reserved", "of"], rows)
