"""What a campaign starts instead of train.py: writes the record of a run whose graphs cost a second each if not cached.

    python -m tests.campaign_worker RECIPE [overrides]

FAIL_AT in the environment, as MODE:NUMBER: the run of that mode dies once its cache has lived through NUMBER runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from recipes import command_line
from training.record import RunRecord

EAGER_STEP, COMPILED_STEP = 0.4, 0.2
ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """Run as a recipe asks, in no time."""
    parsed = command_line.parse(arguments)
    assert parsed is not None
    recipe, _ = parsed
    recipe.check(recipe.parallel.ranks)
    record = RunRecord(recipe, arguments, ROOT)
    compiled = recipe.run.mode == "compile"
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    graphs = {"head", f"block-{recipe.model.ffn_dim}"} if compiled else set()
    misses = [graph for graph in graphs if not (cache / graph).exists()]
    for graph in misses:
        (cache / graph).touch()
    before = len(list(cache.glob("run-*")))
    (cache / f"run-{before}").touch()
    if os.environ.get("FAIL_AT") == f"{recipe.run.mode}:{before}":
        print("no luck today")
        return 1
    step = COMPILED_STEP if compiled else EAGER_STEP
    record.update(
        timing={
            "first_step_seconds": 1.0 + len(misses),
            "time_to_first_step_seconds": 3.0 + len(misses),
            "steady": {
                "seconds_per_step_median": step,
                "seconds_per_step_min": step,
                "seconds_per_step_max": step,
                "tokens_per_second": 64 / step,
            },
        },
        work={"tokens_per_step": 64},
        compile={
            "cache": {"misses": len(misses), "hits": len(graphs) - len(misses), "state": "cold" if misses else "warm"},
            "late_compiles": [],
        },
        cost={"hours": 0.5, "price_per_hour": 2.0},
    )
    record.finish("finished")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
