"""What the chip is."""

from __future__ import annotations

import os


def get_platform_target() -> str:
    """The chip's short name."""
    return os.environ.get("FIRSTSTEP_SIMULATED_TARGET", "trn2")


def get_logical_neuron_cores() -> str:
    """Physical cores in a logical core, as text."""
    return os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2")
