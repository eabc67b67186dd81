"""The page: what the runs are, how they compare, and the sections that others draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ledger import claims
from ledger.compare import compare
from ledger.report.html import note, table
from ledger.report.progress import learning, steps, total
from ledger.report.wait import compiling, fallbacks, first_step, memory
from ledger.runs import Run, usual_mfu
from ledger.screen import amount, percent
from ledger.verdict import judge

_STYLE = Path(__file__).with_name("style.css")


def page(runs: Sequence[Run]) -> str:
    """Return the page for some runs, as HTML."""
    sections = [
        ("runs", "Runs", _summary(runs)),
        ("comparison", "Comparison", _comparison(runs)),
        ("first-step", "The wait before the first step", first_step(runs)),
        ("steps", "Seconds per step", steps(runs)),
        ("learning", "Loss and gradient norm", learning(runs)),
        ("total", "Time in all", total(runs)),
        ("memory", "Memory", memory(runs)),
        ("compiling", "Compiling and its cache", compiling(runs)),
        ("fallbacks", "Operators that ran on the host", fallbacks(runs)),
        ("verdict", "Against published figures", _verdicts(runs)),
        ("environment", "Environment", _environment(runs)),
    ]
    sections = [(name, title, body) for name, title, body in sections if body]
    title = "First step report: " + ", ".join(run.id for run in runs)
    links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading, _ in sections)
    bodies = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(heading)}</h2>{body}</section>'
        for name, heading, body in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><header><h1>{escape(title)}</h1>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>{bodies}</main></body></html>\n'
    )


def _summary(runs: Sequence[Run]) -> str:
    rows = {
        "state": lambda run: run.state,
        "why it ended": lambda run: run.text("cause") or run.problem or "",
        "recipe": lambda run: run.text("identity.recipe.name") or "n/a",
        "started (UTC)": lambda run: run.text("started_utc") or "n/a",
        "device": lambda run: run.text("environment.device") or "n/a",
        "chip": lambda run: run.text("environment.device_facts.chip") or "n/a",
        "mode": lambda run: run.text("identity.recipe.run.mode") or "n/a",
        "ranks": lambda run: amount(run.get("work.world_size")),
        "parameters": lambda run: amount(run.get("work.parameters")),
        "tokens a step": lambda run: amount(run.get("work.tokens_per_step")),
        "seq_len": lambda run: amount(run.get("work.seq_len")),
        "dtype": lambda run: run.text("work.dtype") or "n/a",
        "first step": lambda run: amount(run.number("timing.first_step_seconds"), "s"),
        "from start to the end of the first step": lambda run: amount(run.number("timing.time_to_first_step_seconds"), "s"),
        "steady tokens/s": lambda run: amount(run.number("timing.steady.tokens_per_second")),
        "MFU (torchtitan numerator)": lambda run: percent(usual_mfu(run)),
        "steps recorded": lambda run: amount(run.get("quality.steps_recorded")),
        "loss, last window": lambda run: amount(run.number("quality.loss_last_window")),
        "hours": lambda run: amount(run.number("cost.hours")),
        "cost": lambda run: amount(run.number("cost.cost"), "USD"),
    }
    found = ([name, *(look(run) for run in runs)] for name, look in rows.items())
    return table(["", *(run.id for run in runs)], (row for row in found if any(row[1:])), text=range(len(runs) + 1))


def _comparison(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    found = compare(list(runs))
    header = ["", *(run.id for run in runs)]
    if not found.comparable:
        rows = ([row.name, *(amount(value) for value in row.values)] for row in found.unequal)
        return "<p><strong class='bad'>Not comparable:</strong> the runs did not do the same work.</p>" + table(
            header, rows, "What differs", range(len(runs) + 1)
        )
    rows = (
        [row.name, *(amount(value, row.unit) for value in row.values), "" if row.ratio is None else f"{row.ratio:.3f}"]
        for row in found.figures
    )
    body = note("The runs did the same work.") + table([*header, "ratio"], rows)
    if found.interval is not None:
        interval = found.interval
        body += note(
            f"Seconds per step, second over first: {interval.ratio:.3f}; 95 % of the bootstrap over {interval.windows[0]} and "
            f"{interval.windows[1]} windows: {interval.low:.3f} to {interval.high:.3f}."
        )
    if found.loss_gap is not None:
        gap = found.loss_gap
        body += note(f"Losses are furthest apart in step {gap.step}, by {gap.gap:+.4g} nats, of {gap.steps} that both have.")
    return body


def _verdicts(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        for name in claims.names():
            found = judge(run, claims.load(name))
            reasons = dict.fromkeys(finding.reason for finding in found.findings)
            rows.append([run.id, name, found.verdict, "; ".join(reasons)])
    return table(["run", "claim", "verdict", "why"], rows, text=range(4))


def _environment(runs: Sequence[Run]) -> str:
    rows = list(_facts(runs))
    body = table(["", *(run.id for run in runs)], rows, text=range(len(runs) + 1))
    variables = [
        [run.id, *(str(each.get(name, "")) for name in ("name", "value", "set_by", "reason"))]
        for run in runs
        for each in run.get("environment.variables") or ()
        if isinstance(each, dict)
    ]
    header = ["run", "variable", "value", "set by", "reason"]
    return body + table(header, variables, "Variables that were set or found", range(5))


def _facts(runs: Sequence[Run]) -> Iterator[list[str]]:
    def row(name: str, values: Iterable[Any]) -> list[str]:
        return [name, *("n/a" if value is None else str(value) for value in values)]

    def arguments(run: Run) -> str | None:
        found = run.get("identity.argv")
        return " ".join(map(str, found)) if isinstance(found, list) else None

    yield row("command line", map(arguments, runs))
    yield row("commit", (run.text("identity.git_commit") for run in runs))
    yield row("changed since", ({True: "yes", False: "no"}.get(run.get("identity.git_dirty")) for run in runs))
    for name in ("host", "platform", "python"):
        yield row(name, (run.text(f"environment.software.{name}") for run in runs))
    for section in ("environment.software.packages", "environment.device_facts"):
        found = [value if isinstance(value := run.get(section), dict) else {} for run in runs]
        for name in dict.fromkeys(name for each in found for name in each):
            if any(not isinstance(each.get(name), (dict, list, type(None))) for each in found):
                yield row(name.replace("_", " "), (each.get(name) for each in found))
