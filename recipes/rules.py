"""Every rule a recipe must satisfy before anything is built: one line per rule, each saying what, got, allowed, fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from recipes.base import Recipe

_POSITIVE = (
    "model.num_layers",
    "model.ffn_dim",
    "model.vocab_size",
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "validation.num_batches",
    "run.log_every",
    "optimizer.eps",
)
_NOT_NEGATIVE = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "training.max_grad_norm",
    "validation.every_steps",
    "run.seed",
    "run.price_per_hour",
)
_SHARE = ("optimizer.decay_fraction", "optimizer.min_lr_ratio")


def broken_rules(recipe: Recipe, world_size: int) -> list[str]:
    """Return one sentence for every broken rule, in the order of the recipe's sections."""
    problems = [*_choices(recipe), *_ranges(recipe)]
    # The rules below compare fields, which only makes sense once each field is legal by itself.
    return problems or [*_batches(recipe, world_size), *_schedule(recipe), *_data(recipe), *_run(recipe)]


def _value(recipe: Recipe, path: str):
    section, name = path.split(".")
    return getattr(getattr(recipe, section), name)


def _choices(recipe: Recipe):
    for section_name in ("data", "optimizer", "training", "parallel", "compile", "run"):
        section = getattr(recipe, section_name)
        for name, hint in get_type_hints(type(section)).items():
            if get_origin(hint) is Literal and getattr(section, name) not in get_args(hint):
                allowed = ", ".join(get_args(hint))
                yield f"{section_name}.{name}: got {getattr(section, name)!r}, allowed: {allowed}"


def _ranges(recipe: Recipe):
    for path in _POSITIVE:
        value = _value(recipe, path)
        if value is not None and not value > 0:
            yield f"{path}: got {value}, allowed: more than 0"
    for path in _NOT_NEGATIVE:
        value = _value(recipe, path)
        if value is not None and not value >= 0:
            yield f"{path}: got {value}, allowed: 0 or more"
    for path in _SHARE:
        if not 0 <= _value(recipe, path) <= 1:
            yield f"{path}: got {_value(recipe, path)}, allowed: 0 to 1"
    for beta in recipe.optimizer.betas:
        if not 0 <= beta < 1:
            yield f"optimizer.betas: got {beta}, allowed: 0 or more and less than 1"
    if recipe.data.held_out_every < 2:
        yield f"data.held_out_every: got {recipe.data.held_out_every}, allowed: 2 or more (1 would leave nothing to train on)"


def _batches(recipe: Recipe, world_size: int):
    if world_size != 1:
        yield (
            f"this release trains on one process: got WORLD_SIZE={world_size}, allowed: 1; "
            "start it with `python train.py`, without torchrun"
        )
    samples = recipe.training.local_batch_size * world_size
    total = recipe.training.global_batch_size
    if total is not None and total % samples:
        yield (
            f"training.global_batch_size: got {total}, allowed: a multiple of local_batch_size x ranks = {samples}; "
            f"use {max(samples, total - total % samples)}"
        )


def _schedule(recipe: Recipe):
    if recipe.optimizer.warmup_steps > recipe.training.steps:
        yield (
            f"optimizer.warmup_steps: got {recipe.optimizer.warmup_steps}, allowed: at most training.steps = "
            f"{recipe.training.steps}; lower the warm-up or train longer"
        )


def _data(recipe: Recipe):
    data = recipe.data
    if data.source == "stdlib" and data.path is not None:
        yield f"data.path: got {data.path!r} with data.source stdlib, allowed: none; set --data.source files or hub"
    if data.source != "stdlib" and data.path is None:
        yield f"data.path: got none with data.source {data.source}; set --data.path"
    if data.source != "hub" and data.subset is not None:
        yield f"data.subset: got {data.subset!r} with data.source {data.source}, allowed: none; it names a hub configuration"


def _run(recipe: Recipe):
    run = recipe.run
    if run.price_per_hour is not None and not run.price_source:
        yield "run.price_source: got none with a price; say where the price comes from and its date"
    if run.mode == "eager" and recipe.compile.backend is not None:
        yield f"compile.backend: got {recipe.compile.backend!r} with run.mode eager, allowed: none; set --run.mode compile"
    if run.profile == "steady" and recipe.training.steps < 5:
        yield f"run.profile: steady traces steps 3 to 5, got training.steps {recipe.training.steps}, allowed: 5 or more"
