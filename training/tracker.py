"""MLflow and Weights & Biases, where they are installed and asked for. The record in the run's folder stays the original.

Sources: https://mlflow.org/docs/latest/python_api/mlflow.html and https://docs.wandb.ai/ref/python/.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.base import RecipeError

INSTALL = {"mlflow": "pip install mlflow", "wandb": "pip install wandb"}
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
_PARAMETERS_AT_ONCE = 100
"""More in one call are refused by an MLflow server."""
_LONGEST_PARAMETER = 500


def require_tracker(name: str) -> None:
    """Return if the tracker is installed, or none is asked for.

    Raises:
        RecipeError: if it is not.
    """
    if name == "none":
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of that name, which W&B itself leaves behind, is no package
        raise RecipeError(f"run.tracker: got {name!r}, which is not installed: {INSTALL[name]}; or use --run.tracker none")


class Tracker(ABC):
    """One run, told to a service."""

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add points to curves."""

    @abstractmethod
    def close(self, record: Mapping[str, Any], folder: Path) -> None:
        """Add what the closed record says, and end the run there with the state that it has here."""


class _MLflow(Tracker):
    def __init__(self, project: str, record: Mapping[str, Any]):
        self.mlflow = importlib.import_module("mlflow")
        self.mlflow.set_experiment(project)
        self.mlflow.start_run(run_name=record["id"])
        items = [(name, str(value)[:_LONGEST_PARAMETER]) for name, value in flat(record["identity"]["recipe"])]
        for begin in range(0, len(items), _PARAMETERS_AT_ONCE):
            self.mlflow.log_params(dict(items[begin : begin + _PARAMETERS_AT_ONCE]))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self, record: Mapping[str, Any], folder: Path) -> None:
        self.mlflow.log_metrics(numbers(record))
        self.mlflow.log_artifact(str(folder / "record.json"))
        self.mlflow.end_run(_STATUS.get(record["status"], "FAILED"))


class _Wandb(Tracker):
    def __init__(self, project: str, record: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        config = dict(flat(record["identity"]["recipe"]))
        self.run = wandb.init(project=project, name=record["id"], id=record["id"], config=config)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, record: Mapping[str, Any], folder: Path) -> None:
        self.run.summary.update({**numbers(record), "status": record["status"]})
        self.run.save(str(folder / "record.json"), base_path=str(folder), policy="now")
        self.run.finish(exit_code=0 if record["status"] == "finished" else 1)


class SafeTracker:
    """A tracker whose failures cost a line and not the run: after one it is not asked again."""

    def __init__(self, name: str, project: str, record: Mapping[str, Any], notify: Callable[[str], None]):
        """Begin the run there. Importing the package takes seconds: do it where no window is being measured."""
        self.name, self.notify = name, notify
        self._tracker: Tracker | None = None
        kind = {"mlflow": _MLflow, "wandb": _Wandb}[name]
        self._tracker = self._try(lambda: kind(project, record))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """As Tracker does."""
        if (tracker := self._tracker) is not None:
            self._try(lambda: tracker.scalars(values, step))

    def close(self, record: Mapping[str, Any], folder: Path) -> None:
        """As Tracker does."""
        if (tracker := self._tracker) is not None:
            self._try(lambda: tracker.close(record, folder))

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            self._tracker = None
            first = (str(error).splitlines() or [""])[0]
            self.notify(f"warning: {self.name} gets nothing more of this run: {type(error).__name__}: {first}")
            return None


def flat(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each field of a recorded recipe as section.field with its value."""
    for section, values in recipe.items():
        if isinstance(values, dict):
            yield from ((f"{section}.{name}", value) for name, value in values.items())
        else:
            yield section, values


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what a run is compared by, out of its record; what is unknown is left out."""
    found = {}
    for path in (
        "timing.first_step_seconds",
        "timing.time_to_first_step_seconds",
        "timing.steady.seconds_per_step_median",
        "timing.steady.tokens_per_second",
        "compile.compile_seconds",
        "compile.late_compile_seconds",
        "compile.cache.hits",
        "compile.cache.misses",
        "memory.peak_allocated_bytes",
        "quality.loss_last_window",
        "cost.hours",
        "cost.cost",
    ):
        value: Any = record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found[path] = float(value)
    entry = next((each for each in (record.get("timing") or {}).get("mfu") or () if each["numerator"] == "torchtitan"), None)
    return found if entry is None or entry["mfu"] is None else found | {"timing.mfu": entry["mfu"]}
