"""Scenarios of the wait, measured: cold cache, warm cache and one edit, each in eager and compile, repeated and interleaved.

A chain is what one cache folder lives through: empty at first, it is filled by the cold run, used by the warm run, and met by
the run with the edit. Every run is a process of its own. What is done is written down after every run, so a campaign that was
interrupted goes on; but a chain never goes on in its middle, because its cache could hold half a run's graphs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from backends import get_backend
from ledger.runs import LedgerError, Run, read_run
from models import model_config
from recipes import command_line
from recipes.base import Recipe
from training.record import git_state

ROOT = Path(__file__).parent.parent
COLD, WARM, EDIT = "cold", "warm", "edit"
SCENARIOS = (COLD, WARM, EDIT)
MODES = ("eager", "compile")


@dataclass(frozen=True)
class Cell:
    """One run of a campaign."""

    repeat: int
    """Counted from 1."""
    scenario: str
    mode: str

    @property
    def chain(self) -> str:
        """Name of the cache folder that it shares with the other scenarios."""
        return f"{self.mode}-{self.repeat}"

    def __str__(self) -> str:
        return f"{self.scenario} {self.mode} {self.repeat}"


@dataclass(frozen=True)
class Plan:
    """What a campaign runs. Kept beside its results: they belong to this and to nothing else."""

    arguments: list[str]
    """Recipe and overrides, as on train.py's command line."""
    edit_name: str
    edit: list[str]
    """The overrides that make the edit."""
    repeats: int
    launcher: list[str]
    """Command that the arguments are appended to."""
    commit: str | None
    modes: list[str] = field(default_factory=lambda: list(MODES))

    def cells(self) -> list[Cell]:
        """Every run in its order: what is compared runs side by side, so that a machine that drifts drifts for both."""
        return [
            Cell(repeat, scenario, mode)
            for repeat in range(1, self.repeats + 1)
            for scenario in SCENARIOS
            for mode in (self.modes if repeat % 2 else reversed(self.modes))
        ]

    def command(self, cell: Cell, runs: Path) -> list[str]:
        """The command line of one run."""
        edit = self.edit if cell.scenario == EDIT else []
        return [*self.launcher, *self.arguments, *edit, "--run.mode", cell.mode, "--run.output_dir", str(runs)]


def parse(arguments: Sequence[str]) -> Recipe:
    """Return the recipe of a command line.

    Raises:
        LedgerError: if it asks for help or for no more than to be shown.
    """
    parsed = command_line.parse(arguments)
    if parsed is None or parsed[1]:
        raise LedgerError(f"campaign: got {shlex.join(arguments)!r}, allowed: a recipe and its overrides")
    return parsed[0]


def edit_of(name: str, recipe: Recipe) -> tuple[str, list[str]]:
    """Return the name and the overrides of an edit: `depth`, `ffn`, or NAME=OVERRIDES.

    Raises:
        LedgerError: if it is none of these.
    """
    config = model_config(recipe.model, recipe.training.seq_len)
    if name == "depth":
        return f"{config.num_layers} -> {config.num_layers + 1} layers", ["--model.num_layers", str(config.num_layers + 1)]
    if name == "ffn":
        wider = 2 * config.ffn_dim
        return f"FFN {config.ffn_dim} -> {wider}", ["--model.ffn_dim", str(wider)]
    title, separator, overrides = name.partition("=")
    if not separator or not title or not overrides.strip():
        raise LedgerError(
            f"--edit: got {name!r}, allowed: depth, ffn, or a name with overrides ('longer=--training.seq_len 512')"
        )
    return title, shlex.split(overrides)


def make_plan(arguments: Sequence[str], edit: str, repeats: int, launcher: str | None) -> Plan:
    """Check everything that can be checked before the first run.

    Raises:
        RecipeError: for a recipe, an edit or a launcher that cannot be used.
    """
    recipe = parse(arguments)
    title, overrides = edit_of(edit, recipe)
    ranks = recipe.parallel.ranks
    for each in (recipe, parse([*arguments, *overrides])):
        each.check(ranks)
        model_config(each.model, each.training.seq_len, each.parallel.tensor_parallel_degree)
    if get_backend(recipe.run.device).compile_cache_variable is None:
        raise LedgerError(
            f"campaign: the compile cache of {recipe.run.device} cannot be moved, so no run can be given an empty one"
        )
    if launcher is None and ranks > 1:
        raise LedgerError(
            f"--launcher: got none, and {recipe.name} is made for {ranks} ranks; say what starts them, for example "
            f"--launcher scripts/launch_trn2.sh, or --launcher 'torchrun --standalone --nproc-per-node {ranks} train.py'"
        )
    if repeats < 1:
        raise LedgerError(f"--repeats: got {repeats}, allowed: 1 or more")
    command = [sys.executable, "train.py"] if launcher is None else shlex.split(launcher)
    return Plan(list(arguments), title, overrides, repeats, command, git_state(ROOT)[0])


class Campaign:
    """A folder with a plan, its runs, and which of them is which.

    Args:
        folder: gets `plan.json`, `cells.json`, `runs/`, `caches/` and `logs/`.
    """

    def __init__(self, folder: Path, plan: Plan):
        """Open the folder, new or left by a campaign with the same plan.

        Raises:
            LedgerError: if another plan's results are in it.
        """
        self.folder, self.plan = folder, plan
        self.runs = folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        file = folder / "plan.json"
        if file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            changed = [name for name, value in asdict(plan).items() if known.get(name) != value]
            if changed:
                was = "; ".join(f"{name} was {known.get(name)!r}, is {getattr(plan, name)!r}" for name in changed)
                raise LedgerError(f"{folder}: holds another campaign ({was}); name a new folder with --folder")
        else:
            _write(file, asdict(plan))
        self.done: dict[str, str] = {}
        with_results = folder / "cells.json"
        if with_results.exists():
            self.done = json.loads(with_results.read_text(encoding="utf-8"))

    def __iter__(self) -> Iterator[tuple[Cell, Run]]:
        """Every run that is done."""
        for cell in self.plan.cells():
            if str(cell) in self.done:
                yield cell, read_run(self.runs / self.done[str(cell)])

    def abandoned(self) -> list[Run]:
        """Runs that were paid for and count for nothing: failed, interrupted, or of a chain that was begun again."""
        return [
            read_run(folder)
            for folder in sorted(self.runs.iterdir())
            if folder.is_dir() and folder.name not in self.done.values()
        ]

    def run(self, progress: Callable[[str], None]) -> None:
        """Run what is not done yet.

        Raises:
            LedgerError: if a run fails, with the end of what it said. The next call goes on from there.
        """
        with self._alone():
            self._forget_broken_chains()
            cells = self.plan.cells()
            if all(str(cell) in self.done for cell in cells):
                return
            progress("one run that is not measured: it fills the caches of files and tokens that no cell is about")
            first = Cell(0, COLD, self.plan.modes[0])
            self._start(first, ["--training.steps", "1", "--optimizer.warmup_steps", "0", "--run.profile", "none"])
            shutil.rmtree(self._cache(first))
            for number, cell in enumerate(cells, start=1):
                if str(cell) in self.done:
                    continue
                run = self._start(cell)
                self.done[str(cell)] = run.id
                _write(self.folder / "cells.json", self.done)
                first, rate = run.number("timing.first_step_seconds"), run.number("timing.steady.tokens_per_second")
                speed = "n/a" if rate is None else f"{rate:,.0f}"
                progress(f"[{number}/{len(cells)}] {cell}: first step {first:.2f} s, {speed} tokens/s")
                if cell.scenario == EDIT:
                    shutil.rmtree(self._cache(cell))

    def _cache(self, cell: Cell) -> Path:
        return self.folder / "caches" / cell.chain

    def _forget_broken_chains(self) -> None:
        """Begin a chain again that was left in its middle."""
        for chain in {cell.chain for cell in self.plan.cells()}:
            cells = [cell for cell in self.plan.cells() if cell.chain == chain]
            if any(str(cell) not in self.done for cell in cells):
                for cell in cells:
                    self.done.pop(str(cell), None)
                shutil.rmtree(self._cache(cells[0]), ignore_errors=True)
        _write(self.folder / "cells.json", self.done)

    def _start(self, cell: Cell, extra: Sequence[str] = ()) -> Run:
        before = set(os.listdir(self.runs))
        log = self.folder / "logs" / f"{cell}.txt".replace(" ", "-")
        log.parent.mkdir(exist_ok=True)
        self._cache(cell).mkdir(parents=True, exist_ok=True)
        variable = get_backend(parse(self.plan.arguments).run.device).compile_cache_variable
        assert variable is not None  # the plan was refused otherwise
        environment = os.environ | {variable: str(self._cache(cell).absolute())}
        command = [*self.plan.command(cell, self.runs.absolute()), *extra]
        code = _run(command, log, environment)
        new = sorted(set(os.listdir(self.runs)) - before)
        runs = [read_run(self.runs / name) for name in new]
        if code != 0 or len(runs) != 1 or runs[0].state != "finished":
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
            raise LedgerError(
                f"campaign: {cell} ended with exit code {code}; {log} ends with:\n  " + "\n  ".join(said) + "\n"
                "what is done is kept: the same command goes on from there"
            )
        return runs[0]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two campaigns in one folder would take each other's runs for their own, and each other's time."""
        with open(self.folder / "lock", "w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(f"{self.folder}: another campaign is running there") from None
            yield


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a command to its end, what it says into a file, and take it along if this process is stopped."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _write(file: Path, content: Mapping[str, object]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)
