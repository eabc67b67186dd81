"""One page of HTML per run or set of runs. It opens without a network, follows the reader's theme, and prints."""
