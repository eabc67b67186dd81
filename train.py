"""Train a recipe: parse, build, THE loop, report.

    python train.py debug                       a tiny Qwen3 on the CPU, eager
    python train.py debug --run.mode compile    the same, compiled
    python train.py --help                      every recipe

Exit code 0: finished. 1: the run failed; its record says why. 2: the recipe or the machine cannot do what was asked, and
nothing was written. 130: interrupted; the record holds what was done until then.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from backends import BackendUnavailable, get_backend
from recipes import command_line
from recipes.base import Recipe, RecipeError
from training import timeline as phases
from training.compile import CompileWatch, compile_keywords
from training.console import Console
from training.flops import count_flops
from training.journal import Journal
from training.metrics import Meter
from training.record import RunFailed, RunRecord
from training.report import Report
from training.timeline import Timeline

if TYPE_CHECKING:
    from backends import Backend

REPOSITORY = Path(__file__).parent
PROFILED_STEPS = {"none": range(0), "first": range(1, 2), "steady": range(3, 6)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    timeline = Timeline()
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop closes the record like Ctrl-C does
    try:
        parsed = command_line.parse(arguments)
        if parsed is None:
            return 0
        recipe, dry_run = parsed
        world_size = os.environ.get("WORLD_SIZE", "1")
        if not world_size.isdecimal():
            raise RecipeError(f"WORLD_SIZE: got {world_size!r}, allowed: a whole number; unset it")
        recipe.check(int(world_size))
        if dry_run:
            print("\n".join(command_line.lines(recipe)))
            return 0
        train(recipe, get_backend(recipe.run.device), timeline, arguments)
        return 0
    except (RecipeError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def train(recipe: Recipe, backend: Backend, timeline: Timeline, arguments: list[str]) -> None:
    """Build what the recipe names, run the loop, and leave a closed record whatever happens.

    Raises:
        RecipeError, BackendUnavailable: before anything is written, if the recipe or the machine cannot do what was asked.
        RunFailed: from the loop, after the record was closed.
    """
    # A backend's variables are read when torch loads. Importing it here also lets every refusal above answer at once.
    environment = backend.set_environment()
    backend.require()
    import torch

    from models import load_family, model_config
    from training.data import build_data
    from training.optimizer import build_optimizer, learning_rate, set_learning_rate
    from training.weights import export_weights, load_weights

    timeline.mark(phases.IMPORTS)
    timeline.mark(phases.PROCESS_GROUP)  # one process: there is nobody to wait for

    training, run = recipe.training, recipe.run
    console = Console(training.steps)
    config = model_config(recipe.model, training.seq_len)
    compile_settings = compile_keywords(recipe, backend)
    train_data, validation_data = build_data(recipe, config.vocab_size, notify=console.note)
    timeline.mark(phases.DATA)

    backend.seed(run.seed)
    torch.use_deterministic_algorithms(run.deterministic)
    device = backend.device()
    family = load_family(recipe.model.family)
    with torch.device("meta"):
        model = family.Model(config)
    timeline.mark(phases.MODEL_BUILD)

    family.parallelize(
        model,
        activation_checkpointing=recipe.parallel.activation_checkpointing,
        compile_region=recipe.compile.region if compile_settings else None,
        compile_kwargs=compile_settings,
    )
    timeline.mark(phases.PARALLELISE)

    model.materialise(device)
    if recipe.model.initial_weights is None:
        model.init_weights(torch.Generator().manual_seed(run.seed))
    else:
        load_weights(model, family.adapter, recipe.model.initial_weights)
    timeline.mark(phases.MATERIALISE)

    optimizer, implementation = build_optimizer(model, recipe.optimizer, backend.adamw)
    timeline.mark(phases.OPTIMIZER_BUILD)

    record = RunRecord(recipe, arguments, REPOSITORY)
    watch = CompileWatch(run.mode == "compile", backend.compile_cache)
    meter = Meter(backend.synchronize)
    flops = count_flops(config, training.seq_len)
    journal = Journal(recipe, record, console, meter, flops.flops_per_token)
    report = Report(recipe, backend, config, train_data, journal, timeline, watch, environment, implementation)
    timeline.attach(backend.synchronize, watch.totals)

    mixed_precision = torch.bfloat16 if training.dtype == "bfloat16" else None
    profiled = PROFILED_STEPS[run.profile]
    disturbed_by = None

    def forward(batch):
        """Return the cross entropy of one micro-batch, summed over its valid tokens."""
        with backend.autocast(mixed_precision):
            return model(batch.tokens, batch.positions, batch.documents, batch.labels)

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
                valid_tokens += batch.num_valid_tokens
        return loss_sum.item() / max(valid_tokens, 1), valid_tokens

    with report, console, ExitStack() as profiling:
        timeline.mark(phases.DATA)
        meter.begin()
        for step in range(1, training.steps + 1):
            if step == profiled.start and profiled:
                profiling.enter_context(backend.profiler(record.folder / "profile"))

            # --- one optimizer step: the mean over the valid tokens of all its micro-batches ---
            batches = [next(train_data) for _ in range(recipe.accumulation_steps())]
            valid_tokens = sum(batch.num_valid_tokens for batch in batches)
            timeline.mark(phases.FIRST_BATCH)
            loss = torch.zeros((), device=device)
            for batch in batches:
                micro_loss = forward(batch.to(device, backend.pin_memory)) / max(valid_tokens, 1)
                timeline.mark(phases.FORWARD)
                micro_loss.backward()
                loss += micro_loss.detach()
                timeline.mark(phases.BACKWARD)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
            lr = learning_rate(step, training.steps, recipe.optimizer)
            set_learning_rate(optimizer, lr)
            optimizer.step()
            optimizer.zero_grad()
            timeline.mark(phases.OPTIMIZER)

            # --- bookkeeping: nothing below waits for the device except at a window's edge ---
            timeline.close()
            meter.add(step, loss, grad_norm, lr, recipe.tokens_per_step(), valid_tokens)
            if journal.add_compilations(watch.observe(step)):
                disturbed_by = "compiled"
            if step in profiled:
                disturbed_by = "profiled"
            console.advance(step)
            validates = recipe.validation.every_steps and step % recipe.validation.every_steps == 0
            if step in (1, training.steps, profiled.start - 1, profiled.stop - 1) or step % run.log_every == 0 or validates:
                if step + 1 == profiled.stop:
                    profiling.close()
                journal.end_window(disturbed_by)
                disturbed_by = None
                if step == 1:
                    report.after_first_step()
                    gc.collect()
                    gc.freeze()  # what exists now lives as long as the run: later collections need not walk it
                if validates:
                    journal.add_validation(step, *validate())
                    journal.add_compilations(watch.observe(step))
                meter.begin()

        if recipe.checkpoint.export:
            folder, start = record.folder / "checkpoints" / "hf", recipe.model.initial_weights
            export_weights(model, family.adapter, folder, train_data.tokenizer.save, step=training.steps, start=start)
            console.note(f"weights: {folder}")


if __name__ == "__main__":
    sys.exit(main())
