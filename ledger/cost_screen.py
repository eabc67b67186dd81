"""What `cost` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ledger.cost import Bill
from ledger.screen import amount, table


def show_bills(bills: Sequence[Bill], console: Console) -> None:
    """Print one line per recipe; of a single recipe every attempt as well."""
    columns = ("attempts", "hours", "cost", "USD/M tokens", "at steady pace", "first result", "compiling", "saved")
    lines = table("recipe", *columns, "how they ended", right=columns)
    for bill in bills:
        first = bill.first_result
        lines.add_row(
            bill.recipe,
            amount(len(bill.attempts)),
            _hours(bill.hours, bill.hours_at_least),
            _money(bill.cost, bill.hours_at_least),
            amount(bill.cost_per_million_tokens),
            amount(bill.steady_cost_per_million_tokens),
            "none yet" if first is None else f"{first.hours:.3f} h" + ("" if first.cost is None else f", {first.cost:.2f} USD"),
            amount(bill.compile_seconds, "s") + (f" ({bill.compile_unknown} unknown)" if bill.compile_unknown else ""),
            amount(bill.saved_seconds, "s") if bill.saved else "n/a",
            ", ".join(f"{count} {state}" for state, count in bill.states.items()),
        )
    console.print(lines)
    if len(bills) == 1:
        _show_attempts(bills[0], console)
    hours, compiling = sum(bill.hours for bill in bills), sum(bill.compile_seconds for bill in bills)
    saved, warm = sum(bill.saved_seconds for bill in bills), sum(len(bill.saved) for bill in bills)
    console.print(
        f"{hours:.3f} hours in all; {compiling / 60:.1f} minutes spent on compiling, {saved / 60:.1f} saved by the cache in "
        f"{warm} runs, against the last cold run of the same work before each"
    )
    if any(bill.cost is None for bill in bills):
        console.print("cost n/a: some runs have no price; give it with --price-per-hour or --instance")


def _show_attempts(bill: Bill, console: Console) -> None:
    columns = ("hours", "cost", "last step", "compiling", "saved")
    lines = table("attempt", "state", "cache", *columns, right=columns)
    saved = {each.id: each.seconds for each in bill.saved}
    for attempt in bill.attempts:
        lines.add_row(
            attempt.id,
            attempt.state,
            attempt.cache_state or "",
            "n/a" if attempt.hours is None else _hours(attempt.hours, attempt.hours_at_least),
            _money(attempt.cost, attempt.hours_at_least),
            amount(attempt.last_step),
            amount(attempt.compile_seconds, "s"),
            amount(saved[attempt.id], "s") if attempt.id in saved else "",
        )
    console.print(lines)


def _hours(hours: float, at_least: bool) -> str:
    return f"{'at least ' if at_least else ''}{hours:.3f}"


def _money(cost: float | None, at_least: bool) -> str:
    return "n/a" if cost is None else f"{'at least ' if at_least else ''}{cost:.2f} USD"
