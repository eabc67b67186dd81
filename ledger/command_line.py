"""python -m ledger: its commands, and what they print."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ledger import claims, screen
from ledger.break_even import break_even, find_pace
from ledger.compare import compare
from ledger.flat import columns, flat
from ledger.runs import LedgerError, find_run, list_rows, read_run
from ledger.verdict import NOT_REPRODUCED, judge, rederive

_FILE_WIDTH = 200
"""Characters of a line where nobody's terminal sets them."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code: 0 answered, 1 the answer is no, 2 the question cannot be answered."""
    options = _parser().parse_args(list(arguments))
    try:
        return options.run(options)
    except LedgerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ledger",
        description="What run records say together: whether two may be compared, which mode pays, what was reproduced.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        added.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where the runs are (runs)")
        added.add_argument("--json", action="store_true", help="the same as data")
        return added

    listed = command("list", _list, "every run, also those that failed, were killed or cannot be read")
    listed.add_argument("--csv", action="store_true", help="one flat row per run: every knob beside every number")
    shown = command("show", _show, "one run")
    shown.add_argument("name", metavar="RUN", help="a folder, an id or a part of one")
    compared = command("compare", _compare, "runs side by side, if they did the same work")
    compared.add_argument("names", metavar="RUN", nargs="+")
    compared.add_argument("--anyway", action="store_true", help="show the figures of unequal work, labelled as such")
    even = command("breakeven", _break_even, "from which step on one run has taken less time in all than another")
    even.add_argument("names", metavar="RUN", nargs=2, help="a run, or claim:NAME/MODE for published figures")
    even.add_argument("--steps", type=int, nargs="+", default=[20, 100, 1000], help="planned numbers of steps (20 100 1000)")
    even.add_argument("--price-per-hour", type=float, help="US dollars; default: as the records say")
    verdict = command("verdict", _verdict, "whether a run reproduces a published one")
    verdict.add_argument("name", metavar="RUN")
    verdict.add_argument("--claim", required=True, help=f"one of: {', '.join(claims.names())}")
    return parser


def _console() -> Console:
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_FILE_WIDTH)


def _list(options: argparse.Namespace) -> int:
    if options.csv:
        rows = [flat(read_run(options.runs / row.id)) for row in list_rows(options.runs)]
        writer = csv.DictWriter(sys.stdout, columns(rows), restval="")
        writer.writeheader()
        writer.writerows(rows)
        return 0
    rows = list_rows(options.runs)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        screen.show_list(rows, _console())
    return 0


def _show(options: argparse.Namespace) -> int:
    run = find_run(options.name, options.runs)
    if options.json:
        print(json.dumps({"id": run.id, "state": run.state, "problem": run.problem, "record": run.record}, indent=1))
    else:
        screen.show_run(run, _console())
    return 0


def _compare(options: argparse.Namespace) -> int:
    if len(options.names) < 2:
        raise LedgerError("compare: name at least two runs")
    found = compare([find_run(name, options.runs) for name in options.names])
    if options.json:
        data = {name: _plain(value) for name, value in vars(found).items() if name != "runs"}
        if not found.comparable and not options.anyway:
            data = {"unequal": data["unequal"]}
        print(json.dumps({"comparable": found.comparable, "runs": [run.id for run in found.runs], **data}, indent=1))
    else:
        screen.show_comparison(found, options.anyway, _console())
    return 0 if found.comparable else 1


def _plain(value: Any) -> Any:
    return [asdict(row) for row in value] if isinstance(value, list) else value and asdict(value)


def _break_even(options: argparse.Namespace) -> int:
    if any(count < 1 for count in options.steps):
        raise LedgerError(f"--steps: got {' '.join(map(str, options.steps))}, allowed: 1 or more")
    a, b = (find_pace(name, options.runs, options.price_per_hour) for name in options.names)
    found = break_even(a, b)
    if options.json:
        totals = [
            {"steps": count, "seconds": [a.total(count), b.total(count)], "ahead": found.winner(count).name}
            for count in options.steps
        ]
        print(json.dumps({**asdict(found), "totals": totals}, indent=1))
    else:
        screen.show_break_even(found, options.steps, _console())
    return 0


def _verdict(options: argparse.Namespace) -> int:
    claim = claims.load(options.claim)
    run = find_run(options.name, options.runs)
    found = judge(run, claim)
    derived = list(rederive(claim, found.mode if found.mode in claim.rows else next(iter(claim.rows))))
    if options.json:
        print(
            json.dumps(
                {"run": run.id, "verdict": found.verdict, **asdict(found), "mfu": [asdict(row) for row in derived]}, indent=1
            )
        )
    else:
        screen.show_verdict(run, found, derived, _console())
    return 1 if found.verdict == NOT_REPRODUCED else 0
