"""What one rank needs, computes and sends in one optimizer step, read off a step on fake tensors.

What is not seen: an allocator's fragmentation, a compiler's scratch memory and what it chooses to keep, a device's own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from preflight.memory import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, MemoryLog, Peak
from preflight.operations import Operations, Traffic
from preflight.stage import Attention, Stage, staged
from recipes.base import Recipe
from training.distributed import Ranks


@dataclass(frozen=True)
class Rehearsal:
    """One optimizer step of one rank. Bytes and FLOPs, all of this rank."""

    activation_checkpointing: str
    local_batch_size: int
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    table_bytes: int
    """Buffers of the model: the rotary table."""
    activation_bytes: int
    """Kept from the first forward pass for its backward pass."""
    peak: Peak
    """Of a steady step: the optimizer has its state."""
    peaks: dict[tuple[str, str], int]
    """The fullest moment of each phase and place of that step."""
    flops: dict[str, int]
    """By phase."""
    collectives: list[Traffic]

    @property
    def total_flops(self) -> int:
        """All phases together."""
        return sum(self.flops.values())


def rehearse(recipe: Recipe, ranks: Ranks, attention: Attention = "fused") -> Rehearsal:
    """Rehearse one optimizer step of a recipe, eager whatever its mode, as the rank that `ranks` is."""
    log, operations = MemoryLog(), Operations(group_names(ranks))

    def show(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        log.saw(result)
        operations.saw(operator, arguments, keywords, result, log.phase)

    with staged(recipe, ranks, attention=attention) as stage:
        model = stage.model
        log.hold(model.parameters(), PARAMETERS)
        log.hold((value for state in stage.optimizer.state.values() for value in state.values()), OPTIMIZER_STATE)
        log.hold(model.buffers(), INPUTS)
        before = log.now()
        _name_places(model, log)
        batches = recipe.accumulation_steps(ranks.world.size)
        rehearsed = min(batches, 2)  # the second differs from the first, gradients are there; the third is like the second
        kept, counts = [], [operations.snapshot()]
        with ShowOperators(show), log.resizes():
            log.begin()
            for _ in range(rehearsed):
                kept.append(_micro_batch(stage, log))
                counts.append(operations.snapshot())
            log.hold((p.grad for p in model.parameters() if p.grad is not None), GRADIENTS)
            gradient_bytes = log.now()[GRADIENTS]
            log.phase, log.place = "optimizer", "clipping"
            stage.clip()
            log.place = "AdamW"
            stage.update()
        peak, peaks = log.peak(), log.peaks()
        num_parameters = sum(_numel(parameter) for parameter in model.parameters())
    operations.repeat(*counts[-2:], times=batches - rehearsed)
    return Rehearsal(
        activation_checkpointing=recipe.parallel.activation_checkpointing,
        local_batch_size=recipe.training.local_batch_size,
        num_parameters=num_parameters,
        parameter_bytes=before[PARAMETERS],
        gradient_bytes=gradient_bytes,
        optimizer_bytes=before[OPTIMIZER_STATE],
        table_bytes=before[INPUTS],
        activation_bytes=kept[0],
        peak=peak,
        peaks=peaks,
        flops={phase: flops for phase, flops in operations.flops.items() if flops},
        collectives=operations.traffic(),
    )


def _micro_batch(stage: Stage, log: MemoryLog) -> int:
    """One forward and backward pass. Returns the bytes that are kept between the two."""
    batch = stage.batch()
    log.hold([tensor for tensor in batch if tensor is not None], INPUTS)
    log.phase, before = "forward", log.now()
    loss = stage.forward(batch)
    kept = log.now()[ACTIVATIONS] - before[ACTIVATIONS]
    log.phase = "backward"
    stage.backward(loss)
    return kept


def _name_places(model: nn.Module, log: MemoryLog) -> None:
    """Let the log know which part of the model runs: forward by hooks, backward by the gradient of its output."""

    def enter(name: str):
        def hook(*_: Any) -> None:
            log.place = name

        return hook

    def leave(name: str):
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: setattr(log, "place", name))

        return hook

    for name, module in model.named_modules():
        is_block = name.startswith("layers.") and name.count(".") == 1
        if is_block or (name and "." not in name and name != "layers"):
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave(name))


class ShowOperators(TorchDispatchMode):
    """Shows every operator on plain tensors; one on DTensors comes again as plain ones.

    Args:
        show: gets the operator, its arguments, its keywords and its result.
    """

    def __init__(self, show: Any):
        super().__init__()
        self.show, self.muted = show, False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell Dynamo that this mode changes nothing: under any other it would compile nothing."""
        return True

    def __enter__(self) -> ShowOperators:
        # DTensor finds out shapes by running operators on the global ones: nobody allocates or computes those.
        self._original = original = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(propagator: ShardingPropagator, *arguments: Any, **keywords: Any) -> Any:
            before, self.muted = self.muted, True
            try:
                return original(propagator, *arguments, **keywords)
            finally:
                self.muted = before

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        ShardingPropagator._propagate_tensor_meta_non_cached = self._original  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if not self.muted:
            self.show(func, args, keywords, result)
        return result


def group_names(ranks: Ranks) -> dict[str, str]:
    """Return what each process group is called in the mesh, by torch's name for it."""
    if ranks.world.size == 1:
        return {}
    names: dict[str, str] = {dist.group.WORLD.group_name: "all ranks"}  # type: ignore[union-attr]
    if ranks.mesh is not None:
        for axis in ranks.mesh.mesh_dim_names or ():
            names[ranks.mesh.get_group(axis).group_name] = axis
    return names


def _numel(parameter: Tensor) -> int:
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
