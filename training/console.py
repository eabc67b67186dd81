"""What a person sees while a run goes on: a live bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from training.metrics import Window
from training.timeline import Timeline


class Console:
    """Prints the run. Unknown values read n/a.

    Args:
        quiet: print nothing: of many ranks one speaks.
    """

    def __init__(self, total_steps: int, console: RichConsole | None = None, *, quiet: bool = False):
        self.console = console or RichConsole(markup=False, highlight=False, soft_wrap=True, quiet=quiet)
        self.total_steps = total_steps
        self._progress: Progress | None = None

    def __enter__(self) -> Console:
        """Start the live bar, where there is a terminal to draw it on."""
        if self.console.is_terminal and not self.console.quiet:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self._progress.add_task("first step", total=self.total_steps)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Print one line."""
        self.console.print(text)

    def facts(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print a titled block of name and value."""
        rows = list(rows)
        width = max(len(name) for name, _ in rows)
        self.note(title)
        for name, value in rows:
            self.note(f"  {name:<{width}}  {value}")

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def window(self, window: Window, share: float | None, deterministic: bool) -> None:
        """Print one window of steps.

        Args:
            share: MFU of this window, 0 to 1.
            deterministic: whether the speed is withheld.
        """
        last = window.steps[-1]
        speed = f"{window.seconds_per_step:.3f} s/step  {window.tokens_per_second:,.0f} tokens/s  MFU {percent(share)}"
        self.note(
            f"step {last.step:>{len(str(self.total_steps))}}/{self.total_steps}  loss {last.loss:.4f}  "
            f"grad_norm {last.grad_norm:.3f}  lr {last.lr:.2e}  {'deterministic, speed not quoted' if deterministic else speed}"
            + (f"  [{window.disturbed_by}]" if window.disturbed_by else "")
        )
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=f"loss {last.loss:.4f}")

    def first_step(self, timeline: Timeline) -> None:
        """Print where the wait for the first step went."""
        whole = seconds(timeline.time_to_first_step_seconds)
        self.note(f"first step {seconds(timeline.first_step_seconds)}, {whole} after process start:")
        for name, phase in timeline.phases.items():
            compiling = phase.compile.compile_seconds
            detail = f"  of which compiling {compiling:.2f} s" if compiling else ""
            if phase.seconds >= 0.005:
                self.note(f"  {name.replace('_', ' '):<24}{phase.seconds:7.2f} s{detail}")


def percent(share: float | None) -> str:
    """Return 0.2389 as 23.89 %, and None as n/a."""
    return "n/a" if share is None else f"{100 * share:.2f} %"


def seconds(value: float | None) -> str:
    """Return seconds with two decimals, and None as n/a."""
    return "n/a" if value is None else f"{value:.2f} s"


def gigabytes(value: int | None) -> str:
    """Return bytes as GB (10^9), and None as n/a."""
    return "n/a" if value is None else f"{value / 1e9:.2f} GB"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table with the first column to the left and numbers to the right."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*row)
    return result
