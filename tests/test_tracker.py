"""MLflow and Weights & Biases: asked for by name, refused when missing, and never the end of a run."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import train
from tests.durable import run
from tests.test_train import TINY
from training.tracker import numbers, require_tracker

FLAGS = ["--run.log_every", "2", "--validation.every_steps", "4", "--validation.num_batches", "1"]


class Calls(ModuleType):
    """Stands in for a package: notes how it is called. What `fails` names raises."""

    def __init__(self, name: str, fails: str | None = None):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="somewhere")
        self.calls: list[tuple[str, tuple, dict]] = []
        self.fails = fails
        self.summary = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            if name == self.fails:
                raise ConnectionError("no route\nto the server")
            return self

        return call

    def of(self, name: str) -> list[tuple[tuple, dict]]:
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


def curve(points: list[tuple[tuple, dict]], name: str) -> dict[int, float]:
    return {named["step"]: values[name] for (values,), named in points if "step" in named and name in values}


def test_mlflow_gets_what_the_record_says(tmp_path: Path, monkeypatch):
    mlflow = Calls("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    done = run(tmp_path, *FLAGS, "--run.tracker", "mlflow", "--run.tracker_project", "mine", steps=6)
    assert mlflow.of("set_experiment") == [(("mine",), {})]
    assert mlflow.of("start_run") == [((), {"run_name": done.record["id"]})]
    parameters = {name: value for (values,), _ in mlflow.of("log_params") for name, value in values.items()}
    assert parameters["training.steps"] == "6" and parameters["name"] == "debug"
    assert all(len(values) <= 100 for (values,), _ in mlflow.of("log_params"))
    assert curve(mlflow.of("log_metrics"), "loss/train") == {step["step"]: step["loss"] for step in done.steps}
    assert curve(mlflow.of("log_metrics"), "loss/validation") == {
        each["step"]: each["loss"] for each in done.record["quality"]["validation"]
    }
    assert mlflow.of("log_metrics")[-1] == ((numbers(done.record),), {})
    assert mlflow.of("end_run") == [(("FINISHED",), {})]
    assert numbers(done.record)["timing.first_step_seconds"] == done.record["timing"]["first_step_seconds"]


def test_wandb_gets_what_the_record_says(tmp_path: Path, monkeypatch):
    wandb = Calls("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    done = run(tmp_path, *FLAGS, "--run.tracker", "wandb", steps=6)
    ((_, begun),) = wandb.of("init")
    assert (begun["project"], begun["name"], begun["config"]["training.steps"]) == ("firststep", done.record["id"], 6)
    assert curve(wandb.of("log"), "grad_norm") == {step["step"]: step["grad_norm"] for step in done.steps}
    steps = [named["step"] for _, named in wandb.of("log")]
    assert steps == sorted(steps), "it drops what goes back"
    assert wandb.summary["status"] == "finished" and wandb.of("finish") == [((), {"exit_code": 0})]


@pytest.mark.parametrize("fails", ["start_run", "log_metrics", "log_artifact"])
def test_a_tracker_that_fails_costs_a_line(fails: str, tmp_path: Path, monkeypatch, capsys):
    mlflow = Calls("mlflow", fails)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    done = run(tmp_path, *FLAGS, "--run.tracker", "mlflow", steps=6)
    assert done.code == 0 and done.record["status"] == "finished" and len(done.steps) == 6
    assert capsys.readouterr().out.count("mlflow gets nothing more of this run: ConnectionError: no route\n") == 1
    assert len(mlflow.of(fails)) == 1


def test_one_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(place for place in sys.path if not (Path(place) / "wandb").exists())])
    assert train.main([*TINY, "--run.tracker", "wandb", "--run.output_dir", str(tmp_path / "runs")]) == 2
    assert "run.tracker: got 'wandb', which is not installed: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    require_tracker("none")
