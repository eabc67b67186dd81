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
    "parallel.ranks",
    "parallel.tensor_parallel_degree",
    "parallel.data_parallel_shard_degree",
    "parallel.data_parallel_replicate_degree",
    "comm.first_step_timeout_seconds",
    "comm.step_timeout_seconds",
    "comm.heartbeat_seconds",
    "run.log_every",
    "run.budget_minutes",
    "checkpoint.keep_last",
    "health.max_skipped_steps",
    "optimizer.eps",
)
_NOT_NEGATIVE = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.warmup_steps",
    "training.max_grad_norm",
    "validation.every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep_every_steps",
    "health.loss_spike",
    "health.grad_norm_spike",
    "health.checksum_every_steps",
    "parallel.prefetch_blocks",
    "run.seed",
    "run.price_per_hour",
)
_LONGEST_WAIT = 7 * 24 * 3600
"""Seconds. A longer time-out was meant in another unit."""
_SHARE = ("optimizer.decay_fraction", "optimizer.min_lr_ratio")


def broken_rules(recipe: Recipe, world_size: int) -> list[str]:
    """Return one sentence for every broken rule, in the order of the recipe's sections."""
    problems = [*_choices(recipe), *_ranges(recipe)]
    # The rules below compare fields, which only makes sense once each field is legal by itself.
    if not problems:
        problems = [*_layout(recipe, world_size)]
    return problems or [*_batches(recipe, world_size), *_schedule(recipe), *_data(recipe), *_run(recipe)]


def _value(recipe: Recipe, path: str):
    section, name = path.split(".")
    return getattr(getattr(recipe, section), name)


def _choices(recipe: Recipe):
    for section_name in ("data", "optimizer", "training", "parallel", "compile", "checkpoint", "health", "run"):
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
    for name, value in vars(recipe.comm).items():
        if value > _LONGEST_WAIT:
            yield f"comm.{name}: got {value}, allowed: at most {_LONGEST_WAIT:,} (a week); the unit is seconds"
    for path in _SHARE:
        if not 0 <= _value(recipe, path) <= 1:
            yield f"{path}: got {_value(recipe, path)}, allowed: 0 to 1"
    for beta in recipe.optimizer.betas:
        if not 0 <= beta < 1:
            yield f"optimizer.betas: got {beta}, allowed: 0 or more and less than 1"
    if recipe.data.held_out_every < 2:
        yield f"data.held_out_every: got {recipe.data.held_out_every}, allowed: 2 or more (1 would leave nothing to train on)"


def _layout(recipe: Recipe, world_size: int):
    """Whether the ranks can be arranged as asked. Whether the network's own dimensions divide is for models/ to say."""
    parallel, tensor, seq_len = recipe.parallel, recipe.parallel.tensor_parallel_degree, recipe.training.seq_len
    if world_size % tensor:
        launch = f"torchrun --nproc_per_node {max(parallel.ranks, tensor)} train.py {recipe.name}"
        yield (
            f"parallel.tensor_parallel_degree: got {tensor} with ranks = {world_size}, allowed: a divisor of the ranks; "
            f"start more of them ({launch}) or lower it"
        )
        return
    if seq_len % tensor:
        yield (
            f"training.seq_len: got {seq_len}, allowed: a multiple of parallel.tensor_parallel_degree = {tensor}, over "
            f"which it is split; use {seq_len // tensor * tensor or tensor}"
        )
    replicas, shards = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
    data_parallel, wrapper = recipe.data_parallel_size(world_size), parallel.data_parallel_wrapper
    degrees = f"{replicas} replicas x {shards or 'the remaining'} shards x {tensor} tensor-parallel ranks"
    if wrapper == "ddp":
        if tensor > 1 or shards not in (None, 1) or replicas not in (1, data_parallel):
            yield (
                f"parallel.data_parallel_wrapper: got ddp with {degrees}, allowed: each of the {world_size} ranks a replica; "
                "leave the degrees alone or use fsdp2"
            )
    elif data_parallel % replicas or (shards is not None and replicas * shards != data_parallel):
        yield (
            f"parallel: got {degrees}, allowed: a product of ranks = {world_size}; "
            "leave data_parallel_shard_degree out to use all that remain"
        )
    elif 1 < replicas == data_parallel:
        yield (
            f"parallel.data_parallel_replicate_degree: got {replicas}, which leaves nothing to shard over with ranks = "
            f"{world_size}, allowed: fewer; for replicas alone use --parallel.data_parallel_wrapper ddp"
        )
    whole_model = recipe.run.mode == "compile" and recipe.compile.region == "model"
    if whole_model and world_size > 1 and parallel.activation_checkpointing == "full":
        yield (
            "compile.region: got model with several ranks and activation_checkpointing full, which torch 2.13 cannot compile, "
            "allowed: block; or use --parallel.activation_checkpointing selective"
        )
    if whole_model and data_parallel > 1 and wrapper != "simple_fsdp":
        yield (
            f"compile.region: got model with data_parallel_wrapper {wrapper}, which works between graphs, allowed: block; "
            "or use --parallel.data_parallel_wrapper simple_fsdp"
        )
    if parallel.prefetch_blocks and wrapper != "fsdp2":
        yield (
            f"parallel.prefetch_blocks: got {parallel.prefetch_blocks} with data_parallel_wrapper {wrapper}, allowed: 0; "
            "only fsdp2 gathers ahead on request"
        )


def _batches(recipe: Recipe, world_size: int):
    samples = recipe.training.local_batch_size * recipe.data_parallel_size(world_size)
    total = recipe.training.global_batch_size
    if total is not None and total % samples:
        yield (
            f"training.global_batch_size: got {total}, allowed: a multiple of local_batch_size x data-parallel ranks = "
            f"{samples}; use {max(samples, total - total % samples)}"
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
