"""What a machine costs an hour, as data with source and date in prices.json. A price of your own comes by flag."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ledger.runs import LedgerError

FILE = Path(__file__).with_name("prices.json")


@dataclass(frozen=True)
class Price:
    """What one machine costs."""

    instance: str
    usd_per_hour: float
    kind: str
    """How it was offered at that price."""
    source: str
    date: str
    """When the source was read."""

    def __str__(self) -> str:
        return f"{self.instance} at {self.usd_per_hour:g} USD an hour ({self.kind}, {self.source}, read {self.date})"


def prices() -> list[Price]:
    """Return every price that is known."""
    return [Price(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))]


def price_of(instance: str) -> Price:
    """Return the price of an instance type.

    Raises:
        LedgerError: if none is known for it.
    """
    for price in prices():
        if price.instance == instance:
            return price
    known = ", ".join(price.instance for price in prices())
    raise LedgerError(f"--instance: got {instance!r}, a price is known for: {known}; give your own with --price-per-hour")
