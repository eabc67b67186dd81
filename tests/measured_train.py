"""train.py that says what it holds and moves: `python -m tests.measured_train RECIPE --run.profile steady ...`.

The profile has every allocation and the shapes of every operator, and before gradients are cleared for the last time, one line
says how many bytes of parameters, gradients and optimizer state this rank has.
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

import train
from backends.base import Backend
from tests.simulated_neuron import train as train_on_stand_in


def main(arguments: list[str] | None = None) -> int:
    """Run train.main with a profiler that sees memory."""
    plain = Backend.profile_arguments
    more = {"profile_memory": True, "record_shapes": True}
    Backend.profile_arguments = lambda self, directory: {**plain(self, directory), **more}
    clear = torch.optim.AdamW.zero_grad

    def say_and_clear(optimizer: torch.optim.AdamW) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = {
            "parameters": size(parameters),
            "gradients": size([parameter.grad for parameter in parameters]),
            "optimizer": size([value for state in optimizer.state.values() for value in state.values()]),
        }
        print("HELD", json.dumps(held), flush=True)
        clear(optimizer)

    torch.optim.AdamW.zero_grad = say_and_clear
    try:
        return (train_on_stand_in if "neuron" in (arguments or sys.argv) else train).main(arguments)
    finally:
        torch.optim.AdamW.zero_grad, Backend.profile_arguments = clear, plain


def size(tensors: list[torch.Tensor]) -> int:
    """Bytes of these tensors' memory on this rank; several may be parts of one block."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())


if __name__ == "__main__":
    sys.exit(main())
