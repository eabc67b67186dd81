"""What every test starts from, and what it may not leave behind."""

import os

import pytest
import torch

# Two test processes share the cores; tiny matrices only lose time to more threads.
torch.set_num_threads(1)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def restored_torch_state():
    """Seed, and put back what a run sets for the whole process."""
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
