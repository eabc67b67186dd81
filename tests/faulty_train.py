"""train.py with a fault on one rank: `python -m tests.faulty_train KIND RANK STEP ARGUMENTS`.

KIND is `kill` (the process is gone at once) or `raise`. After an elastic restart the fault does not come again.
"""

from __future__ import annotations

import os
import signal
import sys

import train
from training.metrics import Meter


def main(kind: str, rank: str, at_step: str, *arguments: str) -> int:
    """Run train.main; the fault comes when the rank has done its work of that step, before its record has it."""
    add = Meter.add

    def add_or_fail(self: Meter, step: int, *values, **more) -> None:
        first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first_time and os.environ.get("RANK", "0") == rank and step == int(at_step):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a fault was planted")
        add(self, step, *values, **more)

    Meter.add = add_or_fail
    return train.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
