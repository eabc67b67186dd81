"""A stand-in for torch-neuronx: the device `neuron` on host memory, so that tests run the code that Trainium would.

Names are those of AWS's documentation (D) or of a source snapshot from before the first release (P); what they do is our guess
from the same places. It shows that code is device-agnostic. It shows nothing about Trainium.

| name | trust |
|---|---|
| torch.neuron device, stream, event, RNG and memory functions | D (the page's list was not visible: P for each name) |
| process-group backend neuron, compile backend neuron | D |
| torch.neuron.get_dynamo_metrics, reset_dynamo_metrics | D (fields: P) |
| torch_neuronx.get_fallback_ops, get_executed_ops, clear_op_tracking | P, and field notes |
| torch_neuronx.metrics, its counters CompilationCache.* | P |
| torch_neuronx.utils.get_platform_target, get_logical_neuron_cores | P |
"""

from __future__ import annotations

import os

GATE = "FIRSTSTEP_SIMULATED_NEURON"
"""Set to the folder of the built extensions. Without it this package does nothing: a process can have one such device."""


def _autoload() -> None:
    """Called by `import torch`, through the entry point torch.backends."""
    if GATE in os.environ:
        from torch_neuronx import device

        device.register()


def get_fallback_ops() -> list[str]:
    """Names of operators that ran on the host: those of FIRSTSTEP_SIMULATED_FALLBACK_OPS that have run."""
    pretended = os.environ.get("FIRSTSTEP_SIMULATED_FALLBACK_OPS", "").split()
    return [name for name in get_executed_ops() if name in pretended]


def get_executed_ops() -> list[str]:
    """Names of all operators that have run."""
    from torch_neuronx import device

    return sorted(device.extension().executed())


def clear_op_tracking() -> None:
    """Forget which operators have run."""
    from torch_neuronx import device

    device.extension().clear_executed()
