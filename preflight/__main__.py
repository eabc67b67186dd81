"""Know before paying: does it fit, what compiles, how long is the wait, which mode.

    python -m preflight qwen3_32b_trn2_compiled                      one screen, on any machine with a CPU
    python -m preflight RECIPE [overrides] --json                    the same as data
    python -m preflight RECIPE [overrides] --against RUN             what compiles again since a run, and why
    python -m preflight --doctor [RECIPE]                            is this machine ready

Exit code 0: found out; 1: the doctor found a failure, or the recipe does not fit; 2: it cannot be found out.
"""

from __future__ import annotations

import sys

from preflight.command_line import main

sys.exit(main(sys.argv[1:]))
