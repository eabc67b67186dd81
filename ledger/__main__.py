"""python -m ledger."""

import sys

from ledger.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
