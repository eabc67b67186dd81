"""What goes wrong without ending a run: it is said, counted, and ends the run where the recipe wants that."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recipes.base import Health
from tests.durable import run
from tests.ranks import call
from training.copies import CopiesDiffer, require_equal_copies
from training.health import HealthWatch
from training.metrics import NonFiniteLoss, Step


def step(number: int, loss: float = 2.0, grad_norm: float = 1.0) -> Step:
    return Step(number, loss, grad_norm, 1e-3, 64, 64)


def watch(**settings) -> tuple[HealthWatch, list[str]]:
    notes: list[str] = []
    return HealthWatch(Health(**settings), notes.append), notes


def poison(monkeypatch, steps: set[int]) -> None:
    """Make the gradients of some steps NaN, as a device that computes wrongly would."""
    import training.gradients as gradients

    clip, count = gradients.clip_grad_norm_, iter(range(1, 1000))

    def clip_poisoned(parameters, *rest):
        parameters = list(parameters)
        if next(count) in steps:
            parameters[3].grad.view(-1)[0] = math.nan
        return clip(parameters, *rest)

    monkeypatch.setattr(gradients, "clip_grad_norm_", clip_poisoned)


def test_a_skipped_step_leaves_the_weights_alone(tmp_path: Path, monkeypatch, capsys):
    poison(monkeypatch, {3, 5})
    done = run(tmp_path, "--health.non_finite", "skip", "--checkpoint.export", steps=7)
    assert done.code == 0 and done.record["status"] == "finished"
    quality = done.record["quality"]
    assert quality["skipped_steps"] == [3, 5] and quality["non_finite_steps"] == 2
    assert [each["grad_norm"] is None for each in done.steps] == [number in (3, 5) for number in range(1, 8)]
    assert all(each["loss"] is not None and math.isfinite(each["loss"]) for each in done.steps)
    assert "warning: step 3 skipped: gradient norm nan; the weights stay as they were" in capsys.readouterr().out


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path, monkeypatch):
    poison(monkeypatch, {2, 4, 5, 6})
    done = run(tmp_path, "--health.non_finite", "skip", "--health.max_skipped_steps", "3", steps=9)
    assert done.code == 1 and "step 6: the gradient norm was not finite in 3 steps in a row" in done.record["cause"]
    assert done.record["quality"]["skipped_steps"] == [2, 4, 5, 6]


def test_by_default_a_value_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch):
    poison(monkeypatch, {3})
    done = run(tmp_path, steps=9)
    assert done.code == 1 and "step 3: loss" in done.record["cause"]
    assert done.record["quality"]["non_finite_steps"] == 1


def test_stopping_does_not_wait_for_the_device():
    health, _ = watch()
    norm = SimpleNamespace(isfinite=lambda: pytest.fail("read from the device"))
    assert health.skips(1, norm) is False  # type: ignore[arg-type]


def test_spikes_are_said_once_each_and_counted():
    health, notes = watch(loss_spike=8.0, grad_norm_spike=20.0)
    health.look([step(number, 2.0 + 0.01 * (number % 2)) for number in range(1, 21)])
    assert notes == []
    health.look([step(21, 2.02), step(22, 3.0), step(23, 2.0, 25.0), step(24)])
    assert health.section()["loss_spikes"] == [22] and health.section()["grad_norm_spikes"] == [23]
    assert len(notes) == 2
    assert notes[0].startswith("warning: loss spike in step 22: 3.0000, ") and "deviations above 2.0" in notes[0]
    assert notes[1] == "warning: gradient norm spike in step 23: 25, 25 times the median"


def test_the_first_steps_and_a_falling_loss_are_no_spikes():
    health, notes = watch()
    health.look([step(1, 9.0), step(2, 30.0, 900.0)])  # nothing to compare with yet
    health, notes = watch()
    health.look([step(number, 8.0 - 0.1 * number) for number in range(1, 60)])
    assert notes == [] and health.section()["loss_spikes"] == []


def test_alarms_can_be_turned_off():
    health, notes = watch(loss_spike=0.0, grad_norm_spike=0.0)
    health.look([step(number, 2.0 + 0.01 * (number % 2)) for number in range(1, 21)])
    health.look([step(21, 99.0, 99.0)])
    assert notes == []


def test_the_first_bad_step_of_a_window_is_named():
    health, _ = watch()
    with pytest.raises(NonFiniteLoss, match="step 3: loss nan"):
        health.look([step(2), step(3, math.nan), step(4, math.inf)])


def check_copies() -> None:
    from tests.test_distributed import connected
    from training.distributed import Ranks

    ranks: Ranks = connected()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    require_equal_copies(model, ranks)
    with torch.no_grad():
        if ranks.world.rank == 1:
            model[0].bias[1] = torch.nextafter(model[0].bias[1], torch.tensor(9.0))
    with pytest.raises(CopiesDiffer, match=r"rank 1 and rank 0 no longer hold the same 0\.bias"):
        require_equal_copies(model, ranks)


@pytest.mark.distributed
def test_copies_that_drift_apart_by_one_bit_are_named():
    call(check_copies, 2)


def test_how_often_copies_are_compared(monkeypatch):
    compared: list[int] = []
    monkeypatch.setattr("training.copies.require_equal_copies", lambda model, ranks: compared.append(ranks))
    health, _ = watch(checksum_every_steps=10)
    for number in (1, 5, 9, 14, 15, 20, 25, 29, 45):
        health.compare_copies(number, None, number)  # type: ignore[arg-type]
    assert compared == [14, 20, 45]
