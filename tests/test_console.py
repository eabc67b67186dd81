"""What a person sees while a run goes on."""

import io

import pytest
from rich.console import Console as RichConsole

from training.console import Console


@pytest.mark.parametrize("terminal", [True, False])
def test_a_live_bar_is_drawn_on_a_terminal_only(terminal):
    """Read what is written: the bar counts steps where a person watches, and leaves a log file alone."""
    screen = io.StringIO()
    with Console(total_steps=8, console=RichConsole(file=screen, force_terminal=terminal, width=100)) as console:
        console.advance(3)
    assert ("3/8" in screen.getvalue()) is terminal
    assert (screen.getvalue() == "") is not terminal
