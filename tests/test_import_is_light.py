"""Importing the backends and asking for one by name loads no torch: what must be set before torch can be set before torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pathlib
import sys
import backends

for name in backends.NAMES:
    backend = backends.get_backend(name)
    backend.set_environment()
    backend.check_compile(dynamic=False)

neuron = backends.get_backend("neuron")
neuron.device_nodes = pathlib.Path("/nowhere/neuron*")
try:
    neuron.require()
except backends.BackendUnavailable:
    print("refused")
print(neuron.peaks("bfloat16", "Trainium2")[0].flops)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "torch_neuronx"}))
"""


def test_no_torch_until_it_is_needed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["refused", "158000000000000.0", "[]"]
