"""One rank of `tests.ranks.train`: trains the runs that it is given, one after the other.

Args, from the command line: the module that has `main`, and the plan as JSON.
"""

import importlib
import json
import os
import sys


def work(module: str, plan: str) -> None:
    """Train each run of the plan and print its exit code."""
    main = importlib.import_module(module).main
    for number, run in enumerate(json.loads(plan)):
        os.environ["MASTER_PORT"] = str(run["port"])
        print("RUN", number, main(run["arguments"]), flush=True)
        importlib.import_module("torch._dynamo").reset()


if __name__ == "__main__":
    work(*sys.argv[1:])
