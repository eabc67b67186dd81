"""What `campaign` prints."""

from __future__ import annotations

from rich.console import Console

from ledger.break_even import Answer
from ledger.campaign_results import Results, Spread
from ledger.screen import amount, table


def show_campaign(found: Results, console: Console) -> None:
    """Print the wait and the pace of each scenario, and which mode wins how long a run."""
    console.print("medians over the repeats, with the smallest and the largest", style="bold")
    columns = ("until 1st step", "first step", "tokens/s", "compiled", "late")
    lines = table("cache", "mode", *columns, right=columns)
    for result in found.results:
        scenario = f"edit: {found.edit}" if result.scenario == "edit" else result.scenario
        spreads = (result.until_first_step, result.first_step, result.tokens_per_second, result.compiled, result.late_compiles)
        units = ("s", "s", "", "", "")
        lines.add_row(scenario, result.mode, *(_spread(spread, unit) for spread, unit in zip(spreads, units, strict=True)))
    console.print(lines)
    modes = list(dict.fromkeys(result.mode for result in found.results))
    lines = table("cache", "steps", *modes, "ahead", "by", right=("steps", *modes, "by"))
    for winner in found.winners:
        cells = []
        for mode in modes:
            cost = winner.cost[mode]
            cells.append(f"{winner.seconds[mode]:,.1f} s" + ("" if cost is None else f", {cost:.2f} USD"))
        by = max(winner.seconds.values()) - min(winner.seconds.values())
        lines.add_row(winner.scenario, f"{winner.steps:,}", *cells, winner.mode, f"{by:,.1f} s")
    console.print(lines)
    for scenario, answer in found.crossings.items():
        console.print(f"{scenario}: {_crossing(answer)}")
    console.print(f"{found.hours:.2f} hours in all, {found.abandoned_hours:.2f} of them in runs that count for nothing")


def _spread(spread: Spread | None, unit: str) -> str:
    """Return the median with its ends, where they differ from it."""
    if spread is None:
        return "n/a"
    if spread.low == spread.high:
        return amount(spread.median, unit)
    return f"{amount(spread.median, unit)} ({amount(spread.low)} to {amount(spread.high)})"


def _crossing(answer: Answer) -> str:
    """Return in one sentence from where on which of the two is ahead."""
    if answer.crossing is None:
        return f"{answer.winner(2).name} is ahead at any number of steps"
    latest = "never" if answer.latest_step is None else str(answer.latest_step)
    interval = "" if answer.earliest_step == answer.latest_step else f" (by the spread: {answer.earliest_step} to {latest})"
    return f"{answer.crossing.ahead} is ahead from step {answer.crossing.step} on{interval}"
