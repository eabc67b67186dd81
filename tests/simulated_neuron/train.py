"""train.py on the stand-in: `python -m tests.simulated_neuron.train RECIPE --run.device neuron ...`.

The backend asks for a newer Python and a driver before it looks for the device. Here both are taken as given.
"""

import os
import sys
import tempfile
from pathlib import Path

import train
from backends.neuron import NeuronBackend


def main(arguments: list[str] | None = None) -> int:
    """Run train.main with a backend that finds a driver, and as many cores as ranks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "neuron0").touch()
        NeuronBackend.oldest_python = (3, 11)
        NeuronBackend.device_nodes = Path(folder, "neuron*")
        os.environ.setdefault("NEURON_RT_NUM_CORES", os.environ.get("LOCAL_WORLD_SIZE", "4"))
        return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
