"""What preflight has found out, on one screen or as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.checks import Check
from preflight.against import Comparison
from preflight.campaign import Plan
from preflight.forecast import Seconds
from preflight.outlook import TIMEOUT_FACTOR
from preflight.scaling import LARGEST_BATCH
from preflight.study import Study
from training.console import seconds

_FINDINGS = 5
"""Lines of findings that are shown."""


def as_data(study: Study) -> dict[str, Any]:
    """Return a study for JSON: bytes, FLOPs and seconds of one rank; unknown is null."""
    data = asdict(study)
    data["rehearsal"]["peaks"] = [
        {"phase": phase, "place": place, "bytes": size} for (phase, place), size in study.rehearsal.peaks.items()
    ]
    inventory = data.pop("stored")["inventory"]
    for graph, kept in zip(inventory["graphs"], study.stored.inventory.graphs, strict=True):
        graph |= {"fingerprint": kept.fingerprint, "operators": kept.operators}
        del graph["lines"]
    return {**data, "inventory": inventory}


def show(study: Study, console: Console) -> None:
    """Print a study."""
    mode = "compiled" if study.mode == "compile" else "eager"
    console.print(f"[bold]{study.recipe}[/]: {study.description}", highlight=False)
    print_line(console, "work", f"{study.ranks} ranks, {study.layout}; {study.tokens_per_step:,} tokens a step; {mode}")
    console.print(_choices(study))
    for name, text in _lines(study):
        print_line(console, name, text)


def show_comparison(comparison: Comparison, older: str, console: Console) -> None:
    """Print what compiles again since `older`, and why."""
    console.print(f"[bold]{comparison.verdict}[/] (against {older})", highlight=False)
    for name, entries in (
        ("settings", comparison.changed_settings),
        ("fields", comparison.changed_fields),
        ("sources", comparison.changed_sources),
    ):
        if entries:
            print_line(console, name, "\n".join(entries))
    for new in comparison.new:
        where = f"\nat {new.where}" if new.where else ""
        size = f"{new.graph.operators} operators"
        print_line(console, "new", f"{new.graph.direction} of {new.graph.function}, {size}: {new.difference}{where}")
    for graph in comparison.reused:
        print_line(console, "reused", f"{graph.direction} of {graph.function}, {graph.operators} operators")
    if comparison.new_operators:
        shown = comparison.new_operators[:_FINDINGS]
        more = len(comparison.new_operators) - len(shown)
        print_line(console, "operators", "\n".join([*shown, *([f"and {more} more: --json lists all"] if more else [])]))


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """Print a diagnosis, and what is to be done."""
    styles = {"ok": "green", "warning": "yellow", "failure": "red"}
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for check in checks:
        fix = f"\nfix: {check.fix}" if check.fix else ""
        table.add_row(Text(check.status, styles[check.status]), check.name, Text(check.text + fix))
    console.print(table)


def show_plan(plan: Plan, console: Console) -> None:
    """Print what each launch of a campaign compiles."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("launch", "graphs", "new", "first step"):
        table.add_column(column, justify="left" if column == "launch" else "right")
    for launch in plan.launches:
        table.add_row(Text(launch.command), str(launch.graphs), str(launch.new_graphs), seconds(launch.first_step_seconds))
    console.print(table)
    waiting = "" if plan.waiting_seconds is None else f"; first steps take {seconds(plan.waiting_seconds)} in all"
    number = plan.new_graphs
    console.print(f"[bold]{number} graph{'s' if number != 1 else ''} to compile, from an empty cache{waiting}[/]")


def print_line(console: Console, name: str, text: str) -> None:
    """Print one named fact; what is too long goes on below, indented."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(width=13, style="bold")
    table.add_column(overflow="fold")
    table.add_row(name, text)
    console.print(table, markup=False, highlight=False)


def _choices(study: Study) -> Table:
    table = Table(title=f"one rank's step; device memory {_memory(study)}", title_justify="left", title_style="")
    for column in ("checkpointing", "peak", "fits", "largest local batch", "TFLOP a step"):
        table.add_column(column, justify="left" if column == "checkpointing" else "right")
    for choice in study.choices:
        fits = {True: "yes", False: "no", None: "n/a"}[choice.fits]
        largest = "n/a" if choice.largest_local_batch is None else f"{choice.largest_local_batch:,}"
        if choice.largest_local_batch == LARGEST_BATCH:
            largest += " or more"
        name = choice.activation_checkpointing + (" (chosen)" if choice.is_chosen else "")
        table.add_row(name, _size(choice.peak_bytes), fits, largest, f"{choice.flops / 1e12:.4g}")
    return table


def _memory(study: Study) -> str:
    if study.memory is None:
        return "n/a (name the chip: --run.chip)"
    chip, ranks = study.memory.chip, study.memory.ranks_per_chip
    return f"{_size(study.memory.memory_bytes)}, " + (f"1/{ranks} of a {chip}" if ranks > 1 else f"one {chip}")


def _lines(study: Study) -> Iterator[tuple[str, str]]:
    rehearsal, inventory = study.rehearsal, study.stored.inventory
    peak = rehearsal.peak
    parts = ", ".join(f"{name} {_size(size)}" for name, size in peak.by_category.items() if size >= 0.005 * peak.total_bytes)
    yield "peak", f"{_size(peak.total_bytes)} in {peak.phase}, {peak.place}: {parts}"
    kept = rehearsal
    yield (
        "whole step",
        f"parameters {_size(kept.parameter_bytes)} ({kept.num_parameters:,}), gradients {_size(kept.gradient_bytes)}, "
        f"optimizer state {_size(kept.optimizer_bytes)}, activations kept {_size(kept.activation_bytes)}",
    )
    if rehearsal.collectives:
        big = [f"{m.count} {m.kind} over {m.group}, {_size(m.bytes)}" for m in rehearsal.collectives]
        yield "messages", "; ".join(big)
    yield "compiles", _compiles(study)
    yield from _findings(inventory.findings)
    yield "first step", _first_step(study.outlook)
    yield "time-out", _timeout(study.outlook)
    yield "mode", study.outlook.advice
    yield "least time", _least_time(study)
    yield "verdict", _verdict(study)
    yield (
        "assumed",
        "fp32 parameters and AdamW state; attention as a fused kernel; no fragmentation, no compiler's scratch memory; eager "
        "memory also where the recipe compiles. A plan from fake tensors, not a measurement.",
    )


def _compiles(study: Study) -> str:
    inventory = study.stored.inventory
    operators = f"{len(inventory.operators)} kinds of eager operators"
    if not inventory.graphs:
        return f"no graphs; {operators}"
    distinct = inventory.distinct.values()
    functions = Counter((graph.function, graph.direction) for graph in distinct)
    graphs = []
    for (function, direction), number in functions.items():
        sizes = [graph.operators for graph in distinct if (graph.function, graph.direction) == (function, direction)]
        graphs.append(f"{number} {direction} of {function}, {'/'.join(map(str, sizes))} operators")
    return f"{len(distinct)} graphs: {'; '.join(graphs)}; {operators}"


def _findings(findings: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield the findings, those of one kind and place together; token ids of 64 bits come last, every model has them."""
    together: dict[tuple[str, str | None], list[Any]] = {}
    for finding in findings:
        together.setdefault((finding.kind, finding.where), []).append(finding)
    shown = sorted(together, key=lambda key: (key[0] == "64-bit", key[1] is None))
    for kind, where in shown[:_FINDINGS]:
        alike = together[kind, where]
        place = f"at {where}" if where else "at no line of the model: in the backward pass or within torch"
        more = f", and {len(alike) - 1} more" if len(alike) > 1 else ""
        number = sum(finding.count for finding in alike)
        yield kind, f"{alike[0].text}{more}, {number} time{'s' if number > 1 else ''} {place}"
    if len(shown) > _FINDINGS:
        yield "", f"and {len(shown) - _FINDINGS} more findings: --json lists all"


def _first_step(outlook: Any) -> str:
    if outlook.history:
        waits = {"cold": outlook.cold, "warm": outlook.warm, "as the cache is": outlook.as_is}
        return "; ".join(f"{name} cache {_wait(wait)}" for name, wait in waits.items()).replace("is cache", "is")
    no_history = "n/a, this machine has no past run on this device"
    if not outlook.published:
        return no_history
    steps = ", ".join(f"{value:.1f} s ({name})" for name, value in outlook.published.items())
    return f"{no_history}; published: {steps}"


def _wait(wait: Seconds) -> str:
    if wait.seconds is None:
        return "n/a"
    return f"{seconds(wait.seconds)} ({seconds(wait.low)} to {seconds(wait.high)}, {wait.runs} runs)"


def _timeout(outlook: Any) -> str:
    allowed = f"the recipe allows {outlook.timeout_seconds:.0f} s for the first step"
    if outlook.longest_seconds is None:
        return allowed
    fix = (
        ""
        if outlook.timeout_is_enough
        else f"; too short: --comm.first_step_timeout_seconds {TIMEOUT_FACTOR * outlook.longest_seconds:.0f}"
    )
    return f"{allowed}; the longest expected is {outlook.longest_seconds:.1f} s{fix}"


def _least_time(study: Study) -> str:
    roof = study.roofline
    if roof.overlapped_seconds is None:
        return "n/a: the peaks of the chip are not known"
    text = (
        f"{roof.overlapped_seconds:.3g} s a step if all overlaps, {roof.serial_seconds:.3g} s if nothing does (compute "
        f"{roof.compute_seconds:.3g} s, memory {roof.memory_seconds:.3g} s, links {roof.link_seconds:.3g} s)"
    )
    if study.published is None:
        return text
    step = study.tokens_per_step / study.published.tokens_per_second
    return f"{text}; published: {step:.2f} s a step, {study.published.tokens_per_second:,.0f} tokens/s"


def _verdict(study: Study) -> str:
    chosen = next(choice for choice in study.choices if choice.is_chosen)
    if chosen.fits is None or study.memory is None:
        return "n/a: the device's memory is not known; name the chip with --run.chip"
    room = study.memory.memory_bytes - chosen.peak_bytes
    if chosen.fits:
        return f"fits, with {_size(room)} to spare"
    others = [choice.activation_checkpointing for choice in study.choices if choice.fits]
    fix = (
        f"--parallel.activation_checkpointing {others[0]} would"
        if others
        else "no kind of checkpointing makes it fit: more ranks"
    )
    return f"does not fit: {_size(-room)} too much; {fix}"


def _size(size: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}" if size >= 10 * scale else f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
