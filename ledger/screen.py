"""What the ledger prints: tables of rich, and the same as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ledger.break_even import Answer, Pace
from ledger.compare import Comparison
from ledger.runs import Row, Run
from ledger.verdict import CANNOT_TELL, NOT_REPRODUCED, REPRODUCED, Derived, Verdict

_STYLES = {
    "finished": "green",
    "failed": "red",
    "killed": "red",
    "unreadable": "red",
    "no record": "red",
    "interrupted": "yellow",
    "running": "cyan",
    REPRODUCED: "green",
    NOT_REPRODUCED: "red",
    CANNOT_TELL: "yellow",
}


_LONG = ("why", "value", "name", "peak of a chip", "what differs")
"""Columns that may take several lines."""


def amount(value: Any, unit: str = "") -> str:
    """Return a value as a reader wants it. None: n/a."""
    if value is None:
        return "n/a"
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    if isinstance(value, float):
        digits = f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
        return f"{digits} {unit}".strip()
    return f"{value:,} {unit}".strip() if isinstance(value, int) and not isinstance(value, bool) else str(value)


def percent(share: float | None) -> str:
    """Return a share in percent. None: n/a."""
    return "n/a" if share is None else f"{100 * share:.2f} %"


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table without lines."""
    lines = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        lines.add_column(column, justify="right" if column in right else "left", no_wrap=column not in _LONG)
    return lines


def show_list(rows: Sequence[Row], console: Console) -> None:
    """Print one line per run, newest last, and what the problems of the unreadable ones are."""
    header = (
        "run",
        "state",
        "device",
        "mode",
        "cache",
        "ranks",
        "first step",
        "tokens/s",
        "MFU",
        "loss",
        "steps",
        "hours",
        "cost",
    )
    lines = [header, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Not a table of rich's: ten thousand rows would take it ten seconds.
    out = console.file
    for cells in lines:
        words = (
            cell.ljust(width) if column < 5 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        out.write("  ".join(words).rstrip() + "\n")
    for row in rows:
        if row.problem is not None:
            out.write(f"{row.id}: {row.problem}\n")
    paid = [row.cost for row in rows if row.cost is not None]
    hours = sum(row.hours for row in rows if row.hours is not None)
    total = f", {sum(paid):.2f} USD for the {len(paid)} that have a price" if paid else ""
    out.write(f"{len(rows)} runs, {hours:.2f} hours{total}\n")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.id,
        row.state,
        row.device or "n/a",
        row.mode or "n/a",
        row.cache_state or "",
        amount(row.ranks),
        amount(row.first_step_seconds, "s"),
        amount(row.tokens_per_second),
        percent(row.mfu),
        amount(row.loss),
        amount(row.steps),
        "n/a" if row.hours is None else f"{row.hours:.3f}",
        "" if row.cost is None else f"{row.cost:.2f}",
    )


def show_run(run: Run, console: Console) -> None:
    """Print one run: how it ended, its work, where the time went, what it cost."""
    console.print(Text.assemble((run.id, "bold"), "  ", (run.state, _STYLES.get(run.state, ""))))
    for line in filter(None, (run.problem, run.text("cause"))):
        console.print(f"  {line}", soft_wrap=True)
    sections = {
        "work": ("parameters", "dtype", "seq_len", "tokens_per_step", "world_size", "accumulation_steps"),
        "timing": ("first_step_seconds", "time_to_first_step_seconds", "tokens_per_second_after_first_step"),
        "compile": ("mode", "graphs", "compile_seconds", "late_compile_seconds"),
        "quality": ("loss_first", "loss_last_window", "steps_recorded", "non_finite_steps"),
        "cost": ("hours", "price_per_hour", "price_source", "cost"),
    }
    lines = table("section", "name", "value")
    for section, names in sections.items():
        for number, name in enumerate(names):
            value = run.get(f"{section}.{name}")
            lines.add_row(
                "" if number else section, name.replace("_", " "), amount(value, "s" if name.endswith("seconds") else "")
            )
    for phase in run.get("timing.phases") or ():
        if isinstance(phase, dict):
            lines.add_row("", str(phase.get("phase", "")).replace("_", " "), amount(phase.get("seconds"), "s"))
    resumed = run.get("checkpoints.resumed_from")
    lines.add_row("checkpoints", "resumed from", "none" if not resumed else f"{resumed.get('checkpoint')}")
    lines.add_row("", "saved", str(len(run.get("checkpoints.saves") or ())))
    console.print(lines)


def show_comparison(found: Comparison, anyway: bool, console: Console) -> None:
    """Print what differs, or the figures side by side."""
    ids = [run.id for run in found.runs]
    if not found.comparable:
        console.print("not comparable: the runs did not do the same work", style="bold red")
        lines = table("what differs", *ids)
        for row in found.unequal:
            lines.add_row(row.name, *(amount(value) for value in row.values))
        console.print(lines)
        if not anyway:
            console.print("--anyway shows the figures all the same")
            return
        console.print("shown anyway, of UNEQUAL work:", style="bold yellow")
    lines = table("", *ids, "ratio", right=(*ids, "ratio"))
    for row in (*found.settings, *found.figures, *found.phases):
        ratio = row.ratio if row in found.figures or row in found.phases else None
        lines.add_row(row.name, *(amount(value, row.unit) for value in row.values), "" if ratio is None else f"{ratio:.3f}")
    console.print(lines)
    if found.interval is not None:
        interval = found.interval
        console.print(
            f"seconds a step, second over first: {interval.ratio:.3f} (95 % of the bootstrap over {interval.windows[0]} and "
            f"{interval.windows[1]} windows: {interval.low:.3f} to {interval.high:.3f})"
        )
    if found.loss_gap is not None:
        gap = found.loss_gap
        console.print(f"losses: furthest apart in step {gap.step}, by {gap.gap:+.4g}, of {gap.steps} steps that both have")


def show_break_even(found: Answer, steps: Sequence[int], console: Console) -> None:
    """Print where one overtakes the other, and what each number of steps takes."""
    for pace in (found.a, found.b):
        cache = f", cache {pace.cache_state}" if pace.cache_state else ""
        console.print(
            f"{pace.name}: first step {amount(pace.first_seconds, 's')}, then {pace.step_seconds:.4g} s a step{cache}"
        )
    if found.crossing is None:
        console.print(f"{found.winner(2).name} is ahead at any number of steps")
    else:
        crossing = found.crossing
        cost = "" if crossing.cost is None else f", {crossing.cost:.2f} USD"
        tokens = "" if crossing.tokens is None else f", {crossing.tokens:,} tokens"
        console.print(f"{crossing.ahead} is ahead from step {crossing.step} on: {crossing.seconds:,.1f} s{tokens}{cost}")
        latest = "never" if found.latest_step is None else str(found.latest_step)
        if (found.earliest_step, found.latest_step) != (crossing.step, crossing.step):
            console.print(f"  by the spread of the steps: between step {found.earliest_step} and {latest}")
    columns = [pace.name for pace in (found.a, found.b)]
    lines = table("steps", *columns, "ahead", "by", right=("steps", *columns, "by"))
    for count in steps:
        totals = [pace.total(count) for pace in (found.a, found.b)]
        cells = [_time_and_cost(pace, total) for pace, total in zip((found.a, found.b), totals, strict=True)]
        lines.add_row(f"{count:,}", *cells, found.winner(count).name, f"{abs(totals[0] - totals[1]):,.1f} s")
    console.print(lines)


def _time_and_cost(pace: Pace, seconds: float) -> str:
    cost = pace.cost(seconds)
    return f"{seconds:,.1f} s" + ("" if cost is None else f", {cost:.2f} USD")


def show_verdict(run: Run, found: Verdict, derived: Sequence[Derived], console: Console) -> None:
    """Print the verdict field by field, and under which convention the published MFU comes out."""
    console.print(f"{found.claim.title}\n{found.claim.source}, {found.claim.date}\n")
    lines = table("figure", "published", run.id, "verdict", "why", right=("published", run.id))
    for finding in found.findings:
        verdict = Text(finding.verdict, _STYLES[finding.verdict])
        lines.add_row(finding.name, amount(finding.claimed), amount(finding.found), verdict, finding.reason)
    console.print(lines)
    console.print(Text.assemble("verdict: ", (found.verdict, f"bold {_STYLES[found.verdict]}")))
    if derived:
        console.print(f"\nthe published MFU of {percent(derived[0].claimed)}, worked out from the published tokens/s:")
        lines = table("numerator", "peak of a chip", "MFU", "", right=("MFU",))
        for row in derived:
            peak = f"{row.peak_flops_per_chip / 1e12:.0f} TFLOP/s ({row.peak})"
            lines.add_row(row.numerator, peak, percent(row.mfu), "the published one" if row.is_the_claimed_one else "")
        console.print(lines)
    unknown = [name for name, value in found.claim.work.items() if value.value is None]
    inferred = [name for name, value in found.claim.work.items() if value.status == "inferred"]
    console.print(f"inferred, not published: {', '.join(inferred) or 'nothing'}; unknown: {', '.join(unknown) or 'nothing'}")
