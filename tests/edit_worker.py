"""One rank that trains several times on the stand-in and says which graphs its cache had to compile each time.

Args, from the command line: the runs' arguments and ports, as JSON. Prints one line of JSON for each.
"""

import importlib
import json
import os
import sys
from pathlib import Path


def work(plan: str) -> None:
    main = importlib.import_module("tests.simulated_neuron.train").main
    neuron = importlib.import_module("torch").neuron
    cache = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"])
    known = graphs_in(cache)
    for run in json.loads(plan):
        os.environ["MASTER_PORT"] = str(run["port"])
        neuron.reset_dynamo_metrics()
        code = main(run["arguments"])
        compiled = [(entry.graph_id, entry.graph_name.rpartition("_")[2]) for entry in neuron.get_dynamo_metrics()]
        new = graphs_in(cache) - known
        known |= new
        print("RUN", json.dumps({"code": code, "compiled": compiled, "new": sorted(new)}), flush=True)
        importlib.import_module("torch._dynamo").reset()


def graphs_in(cache: Path) -> set[str]:
    """Return the keys of the cached graphs; single operators of eager mode are left out."""
    return {path.stem for path in cache.glob("**/*.neff") if not path.read_text().startswith("eager ")}


if __name__ == "__main__":
    work(sys.argv[1])
