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
from ledger.cache_commands import add_commands as add_cache_commands
from ledger.cache_pack import CachePackError
from ledger.campaign import Campaign, make_plan
from ledger.campaign_results import results
from ledger.campaign_screen import show_campaign
from ledger.compare import compare
from ledger.cost import bills
from ledger.cost_screen import show_bills
from ledger.flat import columns, flat
from ledger.prices import price_of, prices
from ledger.remove import attempts, check_removable, remove, size
from ledger.report.page import page
from ledger.runs import LedgerError, find_run, list_rows, read_run
from ledger.verdict import NOT_REPRODUCED, judge, rederive
from recipes.command_line import names as recipe_names

_FILE_WIDTH = 200
"""Characters of a line where nobody's terminal sets them."""
_STEPS = "20,100,1000"


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code: 0 answered, 1 the answer is no, 2 the question cannot be answered."""
    options = _parser().parse_args(list(arguments))
    try:
        return options.run(options)
    except (LedgerError, CachePackError) as error:
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
    even.add_argument("--steps", default=_STEPS, metavar="N[,N...]", help=f"planned numbers of steps ({_STEPS})")
    _add_price(even)
    campaign = command(
        "campaign", _campaign, "cold cache, warm cache and one edit, each in eager and compile, repeated: what the wait is"
    )
    campaign.add_argument("--edit", default="ffn", help="depth, ffn (the default), or NAME=OVERRIDES")
    campaign.add_argument("--repeats", type=int, default=3, help="of each scenario in each mode (3)")
    campaign.add_argument("--launcher", help="what starts a run; its arguments are appended (python train.py)")
    campaign.add_argument("--folder", type=Path, help="where it is kept and goes on from (campaigns/RECIPE)")
    campaign.add_argument("--steps", default=_STEPS, metavar="N[,N...]", help=f"planned numbers of steps ({_STEPS})")
    _add_price(campaign)
    campaign.add_argument(
        "recipe", metavar="RECIPE", nargs=argparse.REMAINDER, help="and its overrides, as for train.py; comes last"
    )
    verdict = command("verdict", _verdict, "whether a run reproduces a published one")
    verdict.add_argument("name", metavar="RUN")
    verdict.add_argument("--claim", required=True, help=f"one of: {', '.join(claims.names())}")
    cost = command("cost", _cost, "what results have cost, every attempt included, and what compiling took and the cache saved")
    cost.add_argument("recipes", metavar="RECIPE", nargs="*", help="default: all that have runs")
    _add_price(cost)
    report = command("report", _report, "one page of HTML for a run or a set of runs, which needs no network")
    report.add_argument("names", metavar="RUN", nargs="+")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the folder of the run, or of the runs"
    )
    cache = commands.add_parser("cache", help="a compile cache as one portable file", description="Compile caches.")
    add_cache_commands(cache)
    removed = command("rm", _remove, "remove run folders; what they cost stays known")
    removed.add_argument("names", metavar="RUN", nargs="+")
    removed.add_argument("--yes", action="store_true", help="do it; without this it is only said what would be removed")
    return parser


def _add_price(parser: argparse.ArgumentParser) -> None:
    price = parser.add_mutually_exclusive_group()
    price.add_argument(
        "--price-per-hour", type=float, help="US dollars, all machines of a run together; default: as the records say"
    )
    known = ", ".join(price.instance for price in prices())
    price.add_argument("--instance", metavar="TYPE", help=f"the price of one machine of a type that has one here: {known}")


def _price(options: argparse.Namespace) -> float | None:
    if options.instance is None:
        return options.price_per_hour
    price = price_of(options.instance)
    print(price, file=sys.stderr)
    return price.usd_per_hour


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


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise LedgerError(f"--steps: got {text!r}, allowed: whole numbers of 1 or more, with commas between them ({_STEPS})")
    return [int(part) for part in parts]


def _plain(value: Any) -> Any:
    return [asdict(row) for row in value] if isinstance(value, list) else value and asdict(value)


def _break_even(options: argparse.Namespace) -> int:
    steps = _counts(options.steps)
    a, b = (find_pace(name, options.runs, _price(options)) for name in options.names)
    found = break_even(a, b)
    if options.json:
        totals = [
            {"steps": count, "seconds": [a.total(count), b.total(count)], "ahead": found.winner(count).name} for count in steps
        ]
        print(json.dumps({**asdict(found), "totals": totals}, indent=1))
    else:
        screen.show_break_even(found, steps, _console())
    return 0


def _campaign(options: argparse.Namespace) -> int:
    if not options.recipe:
        raise LedgerError(f"campaign: name a recipe; allowed: {', '.join(recipe_names())}")
    steps = _counts(options.steps)
    plan = make_plan(options.recipe, options.edit, options.repeats, options.launcher)
    campaign = Campaign(options.folder or Path("campaigns", plan.arguments[0]), plan)
    campaign.run(lambda line: print(line, file=sys.stderr, flush=True))
    found = results(campaign, steps, _price(options))
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show_campaign(found, _console())
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


def _cost(options: argparse.Namespace) -> int:
    found = bills(attempts(options.runs), _price(options))
    known = [bill.recipe for bill in found]
    if unknown := set(options.recipes) - set(known):
        raise LedgerError(f"cost: got {', '.join(sorted(unknown))}, recipes with runs in {options.runs}: {', '.join(known)}")
    found = [bill for bill in found if not options.recipes or bill.recipe in options.recipes]
    if options.json:
        print(json.dumps([asdict(bill) for bill in found], indent=1))
    else:
        show_bills(found, _console())
    return 0


def _report(options: argparse.Namespace) -> int:
    runs = [find_run(name, options.runs) for name in dict.fromkeys(options.names)]
    output = options.output or (runs[0].folder if len(runs) == 1 else options.runs) / "report.html"
    try:
        output.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"--output: got {output}, which cannot be written: {error}") from None
    print(json.dumps({"report": str(output)}) if options.json else output)
    return 0


def _remove(options: argparse.Namespace) -> int:
    chosen = [find_run(name, options.runs) for name in dict.fromkeys(options.names)]
    sizes = {run.id: size(run.folder) for run in chosen}
    if options.yes:
        remove(chosen, options.runs)
    else:
        check_removable(chosen, options.runs)
    if options.json:
        print(json.dumps({"removed": options.yes, "bytes": sizes}, indent=1))
        return 0
    for run in chosen:
        print(f"{'removed' if options.yes else 'would remove'} {run.id}, {run.state}, {screen.amount(sizes[run.id], 'bytes')}")
        store = run.text("checkpoints.folder")
        if store is not None and not Path(store).resolve().is_relative_to(run.folder.resolve()):
            print(f"  its checkpoints stay in {store}")
    if not options.yes:
        print("nothing was removed; add --yes")
    return 0
