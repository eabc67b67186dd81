"""Train a recipe: parse, build, THE loop, report.

    python train.py debug --run.mode compile    a tiny Qwen3 on the CPU, compiled
    python train.py --help                      every recipe

Exit code 0: finished. 1: the run failed; its record says why. 2: the recipe or the machine cannot do what was asked, and
nothing was written. 130, 143: stopped by SIGINT, SIGTERM. 75: stopped by run.budget_minutes. After its first step a run that is
stopped saves before it ends, and `--resume` goes on from there.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import BackendUnavailable, get_backend
from recipes import command_line
from recipes.base import Recipe, RecipeError
from training import timeline as phases
from training.compile import CompileWatch, compile_keywords
from training.console import Console
from training.flops import count_flops
from training.journal import Journal
from training.metrics import Meter
from training.precompile import precompile
from training.record import RunFailed, RunRecord, package_versions, run_name
from training.report import Report
from training.resume import resume_point
from training.stopping import Stopping
from training.timeline import Timeline
from training.world import World

if TYPE_CHECKING:
    from backends import Backend
    from backends.base import EnvironmentVariable
    from training.distributed import Ranks

REPOSITORY = Path(__file__).parent
PROFILED_STEPS = {"none": range(0), "first": range(1, 2), "steady": range(3, 6)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    timeline = Timeline()
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop closes the record like Ctrl-C does
    try:
        asked = [word for word in arguments if word != "--precompile"]
        if (parsed := command_line.parse(asked)) is None:
            return 0
        recipe, dry_run = parsed
        world = World.from_environment()
        recipe.check(recipe.parallel.ranks if dry_run and "WORLD_SIZE" not in os.environ else world.size)
        if dry_run:
            print("\n".join(command_line.lines(recipe)))
            return 0
        backend = get_backend(recipe.run.device)
        if asked != arguments:
            return precompile(recipe, backend, world, asked)
        return start(recipe, backend, world, timeline, arguments)
    except (RecipeError, BackendUnavailable, RunFailed) as error:
        complain(error)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        return 130


def complain(error: BaseException) -> None:
    """Print one line, and of several ranks the one whose line it is."""
    rank = os.environ.get("RANK")
    print(f"error: {error}" if rank is None else f"error: rank {rank}: {error}", file=sys.stderr)


def start(recipe: Recipe, backend: Backend, world: World, timeline: Timeline, arguments: list[str]) -> int:
    """Bring torch and the ranks up in the order that every device can bear, train, and return the exit code.

    Raises:
        RecipeError, BackendUnavailable: before anything is written, if the recipe or the machine cannot do what was asked.
        RunFailed: from the loop, after the record was closed.
    """
    # A backend's variables are read when torch loads. Importing it here also lets every refusal above answer at once.
    environment = backend.set_environment()
    backend.check_ranks(world.local_size, recipe.run.chip)
    backend.require()
    from training.distributed import Ranks

    timeline.mark(phases.IMPORTS)
    console = Console(recipe.training.steps, quiet=not world.is_main)
    ranks = Ranks(recipe, world)
    ranks.connect(backend)  # before the device is touched
    try:
        with ranks.watch(timeline, console.note, complain):
            ranks.require_same(work_facts(recipe))
            return train(recipe, backend, ranks, console, timeline, arguments, environment)
    finally:
        ranks.close()


def train(
    recipe: Recipe,
    backend: Backend,
    ranks: Ranks,
    console: Console,
    timeline: Timeline,
    arguments: list[str],
    environment: Sequence[EnvironmentVariable],
) -> int:
    """Build what the recipe names, run the loop, leave a closed record whatever happens, and return the exit code."""
    import torch

    from models import load_family, model_config
    from training.checkpoint import Checkpointer, checkpoint_section, checkpoint_store
    from training.data import build_data
    from training.data_parallel import multiply_dtype, replicated, reshard, sharding
    from training.gradients import clip_grad_norm_
    from training.initialise import initialise
    from training.optimizer import build_optimizer, learning_rate, set_learning_rate
    from training.run_state import RunState
    from training.weights import load_weights, weights_folder

    device = backend.device(ranks.world.local_rank)
    ranks.arrange(backend)
    timeline.mark(phases.PROCESS_GROUP)
    resumed = resume_point(recipe, ranks, console.note)
    timeline.mark(phases.MATERIALISE)

    training, run, parallel = recipe.training, recipe.run, recipe.parallel
    config = model_config(recipe.model, training.seq_len, parallel.tensor_parallel_degree)
    compile_settings = compile_keywords(recipe, backend)
    with ranks.first_on_each_host():  # it fills the caches for the others
        train_data, validation_data = build_data(
            recipe, config.vocab_size, rank=ranks.data_rank, world_size=ranks.data, notify=console.note
        )
    if resumed is not None:
        train_data.load_state_dict(resumed.manifest.data)
    timeline.mark(phases.DATA)

    backend.seed(run.seed)
    torch.use_deterministic_algorithms(run.deterministic)
    family = load_family(recipe.model.family)
    with torch.device("meta"):
        model = family.Model(config)
    timeline.mark(phases.MODEL_BUILD)

    shard = sharding(recipe, ranks)
    family.parallelize(
        model,
        tensor_mesh=ranks.axis("tp"),
        activation_checkpointing=parallel.activation_checkpointing,
        compile_region=recipe.compile.region if compile_settings else None,
        compile_kwargs=compile_settings,
        shard=shard,
    )
    timeline.mark(phases.PARALLELISE)

    model.materialise(device)
    if resumed is None and (weights := recipe.model.initial_weights) is not None:
        load_weights(model, family.adapter, weights_folder(weights, ranks.first_on_each_host()))
    elif resumed is None:
        initialise(model.initialisation(), run.seed, threads=ranks.world.host_threads)
    network = replicated(model, recipe, ranks)
    timeline.mark(phases.MATERIALISE)

    optimizer, implementation = build_optimizer(model, recipe.optimizer, backend.adamw)
    timeline.mark(phases.OPTIMIZER_BUILD)
    state = RunState(model, optimizer, backend, ranks.checkpoint_group)
    if resumed is not None:
        state.load(resumed.store, resumed.manifest, console.note)
        timeline.mark(phases.MATERIALISE)
    first_step = 1 if resumed is None else resumed.manifest.step + 1

    ranks.require_same({"data": train_data.source.fingerprint, "tokenizer": train_data.tokenizer.fingerprint})
    name = ranks.from_main(lambda: run_name(recipe))
    store = ranks.from_main(lambda: checkpoint_store(recipe, Path(run.output_dir, name), resumed, console.note))
    saved = checkpoint_section(store, resumed)
    record = RunRecord(recipe, arguments, REPOSITORY, name, writes=ranks.world.is_main, checkpoints=saved)
    watch = CompileWatch(run.mode == "compile", backend.compile_cache, backend.compile_cache_counters, first_step=first_step)
    meter = Meter(backend.synchronize, sum_losses=ranks.sum_losses)
    flops = count_flops(config, training.seq_len)
    journal = Journal(recipe, record, console, meter, flops.flops_per_token, ranks.world.size, first_step)
    keeper = Checkpointer(recipe, store, resumed, state, ranks, train_data, journal)
    report = Report(recipe, backend, config, train_data, journal, timeline, watch, environment, implementation, ranks, keeper)
    stopping = Stopping(run, ranks, timeline.elapsed, keeper.longest)
    watchdog = ranks.watchdog
    watchdog.own.first_step = first_step
    timeline.attach(backend.synchronize, watch.totals)

    # Sharded weights are gathered in the type of the products; whole ones are cast where they are multiplied.
    autocast_dtype = None if shard else multiply_dtype(recipe)
    profiled = PROFILED_STEPS[run.profile]
    disturbed_by = None

    def forward(batch):
        """Return the cross entropy of one micro-batch, summed over its valid tokens."""
        with backend.autocast(autocast_dtype):
            return network(batch.tokens, batch.positions, batch.documents, batch.labels)

    def validate() -> tuple[float, int]:
        """Return the mean loss over the held-out tokens of exactly num_batches batches, and how many tokens that were."""
        assert validation_data is not None  # it is there if and only if the recipe validates
        validation_data.reset()
        loss_sum, valid_tokens = torch.zeros((), device=device), 0
        # Under no_grad a compiled model would be compiled again for this one difference: use the graphs that are there.
        with torch.set_grad_enabled(run.mode == "compile"):
            for _ in range(recipe.validation.num_batches):
                batch = next(validation_data).to(device, backend.pin_memory)
                loss_sum += forward(batch).detach()
                valid_tokens += batch.num_valid_tokens_of_all_ranks
        reshard(model)
        return ranks.sum_losses([loss_sum])[0] / max(valid_tokens, 1), valid_tokens

    with report, console, stopping, keeper, ranks.contexts(), ExitStack() as profiling:
        ranks.require_shared(record.folder)  # here all meet: whoever was slow is not waited for inside the first step
        timeline.mark(phases.DATA)
        meter.begin()
        if first_step > training.steps:
            console.note(f"step {training.steps} of {training.steps} was done before: there is nothing left to train")
        for step in range(first_step, training.steps + 1):
            watchdog.step = step
            if step == profiled.start and profiled:
                profiling.enter_context(backend.profiler(record.folder / "profile"))

            # --- one optimizer step: the mean over the valid tokens of all its micro-batches, on all ranks ---
            batches = [next(train_data) for _ in range(recipe.accumulation_steps(ranks.world.size))]
            valid_tokens = sum(batch.num_valid_tokens_of_all_ranks for batch in batches)
            timeline.mark(phases.FIRST_BATCH)
            loss = torch.zeros((), device=device)
            for batch in batches:
                micro_loss = forward(batch.to(device, backend.pin_memory)) / max(valid_tokens, 1)
                timeline.mark(phases.FORWARD)
                (micro_loss * ranks.data).backward()  # gradients are averaged over the data-parallel ranks
                loss += micro_loss.detach()
                timeline.mark(phases.BACKWARD)
            grad_norm = clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
            lr = learning_rate(step, training.steps, recipe.optimizer)
            set_learning_rate(optimizer, lr)
            if not journal.health.skips(step, grad_norm):
                optimizer.step()
            optimizer.zero_grad()
            timeline.mark(phases.OPTIMIZER)

            # --- bookkeeping: nothing below waits for the device except at a window's edge ---
            timeline.close()
            meter.add(step, loss, grad_norm, lr, recipe.tokens_per_step(ranks.world.size), valid_tokens)
            if journal.add_compilations(watch.observe(step)):
                disturbed_by = "compiled"
            if step in profiled:
                disturbed_by = "profiled"
            console.advance(step)
            report.stopped = stopping.after_step(step)
            saves = keeper.due(step) or report.stopped is not None
            validates = recipe.validation.every_steps and step % recipe.validation.every_steps == 0
            edge = step % run.log_every == 0 or step in (first_step, training.steps, profiled.start - 1, profiled.stop - 1)
            if edge or validates or saves:
                if step + 1 == profiled.stop:
                    profiling.close()
                journal.end_window(disturbed_by or ("saved" if keeper.is_writing else None))
                disturbed_by = None
                if step == first_step:
                    report.after_first_step()
                    stopping.arm()
                    ranks.shorten_timeout(console.note)
                    gc.collect()
                    gc.freeze()  # what exists now lives as long as the run: later collections need not walk it
                if validates:
                    with watchdog.task("validation"):
                        journal.add_validation(step, *validate())
                    journal.add_compilations(watch.observe(step))
                keeper.poll()
                journal.health.compare_copies(step, model, ranks)
                if saves:
                    keeper.save(step, last=report.stopped is not None or step == training.steps)
                meter.begin()
            if report.stopped is not None:
                break

        if recipe.checkpoint.export and report.stopped is None:
            keeper.export(family.adapter)
    return 0 if report.stopped is None else report.stopped.exit_code


def work_facts(recipe: Recipe) -> dict[str, Any]:
    """Return what must be the same on all ranks before they wait for each other."""
    asked = (line.partition(" = ") for line in command_line.lines(recipe))
    return {
        **{name: value for name, _, value in asked},
        **{f"version of {package}": version for package, version in package_versions().items()},
    }


if __name__ == "__main__":
    sys.exit(main())
