"""Everything that preflight finds out about one recipe, worked out by a few processes side by side."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from backends import get_backend
from backends.chip_limits import ChipLimits
from models import model_config
from preflight.choices import WORK, with_choice
from recipes import command_line
from recipes.base import Published, Recipe

_WORKERS = 2
"""Each holds about 0.4 GiB."""
_FEW_BLOCKS = 4
_AGREE = 0.01
"""How far a peak worked out from short models may be from the rehearsed one before all are rehearsed at full depth."""
KINDS = ("none", "selective", "full")
"""Of activation checkpointing, least recomputation first."""


@dataclass(frozen=True)
class Choice:
    """What the step would need with one kind of activation checkpointing. Bytes and FLOPs of one rank."""

    activation_checkpointing: str
    is_chosen: bool
    peak_bytes: int
    flops: int
    fits: bool | None
    """None: the device's memory is not known."""
    largest_local_batch: int | None
    """Most samples of one forward pass that fit. None: not known."""


@dataclass(frozen=True)
class Study:
    """What is known of a recipe before it is run."""

    recipe: str
    description: str
    ranks: int
    layout: str
    tokens_per_step: int
    mode: str
    memory: ChipLimits | None
    choices: list[Choice]
    rehearsal: Any
    """preflight.rehearsal.Rehearsal of the recipe as it is."""
    stored: Any
    """preflight.stored.Stored: its inventory."""
    roofline: Any
    """preflight.roofline.Roofline."""
    peak_flops: float | None
    published: Published | None
    outlook: Any
    """preflight.outlook.Outlook."""


def study(recipe: Recipe, progress: Callable[[str], None] = lambda text: None) -> Study:
    """Find out everything about a recipe.

    Args:
        progress: told what is being found out.
    """
    backend, training, ranks = get_backend(recipe.run.device), recipe.training, recipe.parallel.ranks
    num_layers = model_config(recipe.model, training.seq_len, recipe.parallel.tensor_parallel_degree).num_layers
    context = multiprocessing.get_context("spawn")
    # A process for each: some of what torch keeps of process groups outlives them.
    with ProcessPoolExecutor(_WORKERS, mp_context=context, initializer=_start_worker, max_tasks_per_child=1) as pool:
        first, *others = KINDS
        waits: dict[str, Future[Any]] = {
            "its memory and messages": pool.submit(_rehearse_and_scale, recipe, [first], num_layers),
            "its graphs": pool.submit(_take, recipe),
            "other kinds of checkpointing": pool.submit(_scale, recipe, others, num_layers),
        }
        if ranks > 1:
            waits["the last rank"] = pool.submit(_take, _shorter(recipe, num_layers), ranks - 1)
        for name, future in waits.items():
            progress(name)
            future.result()
        (rehearsal, scalings), stored, more, *last = (future.result() for future in waits.values())
        scalings |= more
        if last:
            stored.inventory.findings.extend(_rank_constants(stored, last[0]))
        own, batch = scalings[recipe.parallel.activation_checkpointing], training.local_batch_size
        in_full = {}
        if abs(own.peak_bytes(batch) / rehearsal.peak.total_bytes - 1) > _AGREE:  # blocks that are not alike
            others = {kind: with_choice(recipe, kind) for kind in KINDS if kind != recipe.parallel.activation_checkpointing}
            in_full = dict(zip(others, pool.map(_rehearse, others.values()), strict=True))
        progress("its wait")
        figures = published(recipe)
        wait = pool.submit(_outlook, recipe, stored, figures).result()
    limits = backend.limits(recipe.run.chip)
    peak = backend.peak_flops(training.dtype, recipe.run.chip) if recipe.run.device != "cpu" else None
    from preflight.roofline import roofline

    sizes = {"tp": recipe.parallel.tensor_parallel_degree, "dp_shard": recipe.shard_degree(ranks), "all ranks": ranks}
    sizes["dp_replicate"] = recipe.data_parallel_size(ranks) // sizes["dp_shard"]
    return Study(
        recipe=recipe.name,
        description=recipe.description,
        ranks=ranks,
        layout=layout(recipe),
        tokens_per_step=recipe.tokens_per_step(ranks),
        mode=recipe.run.mode,
        memory=limits,
        choices=[_choice(recipe, kind, scalings[kind], in_full, rehearsal, limits) for kind in KINDS],
        rehearsal=rehearsal,
        stored=stored,
        roofline=roofline(rehearsal, recipe.accumulation_steps(ranks), peak.flops if peak else None, limits, sizes),
        peak_flops=peak.flops if peak else None,
        published=figures,
        outlook=wait,
    )


def published(recipe: Recipe) -> Published | None:
    """Return somebody's figures for exactly this work. None: there are none, or an override has changed the work."""
    original = command_line.load(recipe.name)
    same = all(getattr(recipe, section) == getattr(original, section) for section in ("model", "parallel", "compile"))
    for section, names in (("training", WORK), ("run", ("mode", "device"))):
        mine, theirs = getattr(recipe, section), getattr(original, section)
        same = same and all(getattr(mine, name) == getattr(theirs, name) for name in names)
    return recipe.published if same else None


def layout(recipe: Recipe) -> str:
    """Return the mesh in words."""
    ranks, parallel = recipe.parallel.ranks, recipe.parallel
    sizes = {"TP": parallel.tensor_parallel_degree, "FSDP": recipe.shard_degree(ranks)}
    if parallel.data_parallel_wrapper == "ddp":
        sizes = {"TP": parallel.tensor_parallel_degree, "DDP": recipe.data_parallel_size(ranks)}
    else:
        sizes["replicas"] = recipe.data_parallel_size(ranks) // sizes["FSDP"]
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def _choice(
    recipe: Recipe, kind: str, scaling: Any, in_full: dict[str, Any], rehearsal: Any, limits: ChipLimits | None
) -> Choice:
    chosen, batch = kind == recipe.parallel.activation_checkpointing, recipe.training.local_batch_size
    rehearsed = rehearsal if chosen else in_full.get(kind)
    peak = rehearsed.peak.total_bytes if rehearsed else round(scaling.peak_bytes(batch))
    return Choice(
        activation_checkpointing=kind,
        is_chosen=chosen,
        peak_bytes=peak,
        flops=rehearsed.total_flops if rehearsed else round(scaling.total_flops(batch)),
        fits=None if limits is None else peak <= limits.memory_bytes,
        largest_local_batch=None if limits is None or in_full else scaling.largest_batch(limits.memory_bytes),
    )


# --- what runs in the other processes -------------------------------------------------------------------------------------


def _start_worker() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all of them, without a traceback from each
    logging.disable(logging.WARNING)  # torch's advice on a mesh that only exists in part


def _rehearse(recipe: Recipe) -> Any:
    from preflight.rehearsal import rehearse
    from preflight.stage import rehearsed_ranks

    with rehearsed_ranks(recipe, recipe.parallel.ranks) as ranks:
        return rehearse(recipe, ranks)


def _scale(recipe: Recipe, kinds: Sequence[str], num_layers: int) -> dict[str, Any]:
    from preflight.rehearsal import rehearse
    from preflight.scaling import scaling_of
    from preflight.stage import rehearsed_ranks

    with rehearsed_ranks(recipe, recipe.parallel.ranks) as ranks:
        return {
            kind: scaling_of(with_choice(recipe, kind), num_layers, lambda shorter: rehearse(shorter, ranks)) for kind in kinds
        }


def _rehearse_and_scale(recipe: Recipe, kinds: Sequence[str], num_layers: int) -> tuple[Any, dict[str, Any]]:
    return _rehearse(recipe), _scale(recipe, kinds, num_layers)


def _take(recipe: Recipe, rank: int = 0) -> Any:
    from preflight.stored import take

    return take(recipe, rank)


def _rank_constants(first: Any, last: Any) -> Any:
    from preflight.ranks import rank_constants

    return rank_constants(first.inventory, last.inventory)


def _shorter(recipe: Recipe, num_layers: int) -> Recipe:
    """Return the recipe with few blocks if each block is compiled by itself: they give the same graphs as many."""
    if recipe.run.mode == "compile" and recipe.compile.region == "model":
        return recipe
    return replace(recipe, model=replace(recipe.model, num_layers=min(num_layers, _FEW_BLOCKS)))


def _outlook(recipe: Recipe, stored: Any, figures: Published | None) -> Any:
    from preflight.outlook import outlook

    cache = get_backend(recipe.run.device).compile_cache()
    return outlook(recipe, stored, figures, cache_is_empty=not cache.files)
