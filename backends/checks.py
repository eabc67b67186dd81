"""What a doctor says of one thing: fine, worth a look, or in the way, with the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One line of a diagnosis."""

    name: str
    status: Literal["ok", "warning", "failure"]
    text: str
    fix: str = ""
    """What to do. Empty where nothing is wrong."""
