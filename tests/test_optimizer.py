"""The learning-rate schedule is a pure function of the step, and AdamW does what the recipe says."""

from dataclasses import replace

import pytest
import torch

from recipes.base import Optimizer, RecipeError
from training.optimizer import build_optimizer, learning_rate, set_learning_rate

COSINE = Optimizer(lr=1.0, warmup_steps=10, schedule="cosine", min_lr_ratio=0.1)


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, 100, COSINE) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]


def test_cosine_passes_the_middle_and_ends_at_its_floor():
    assert learning_rate(55, 100, COSINE) == pytest.approx(0.55)
    assert learning_rate(100, 100, COSINE) == pytest.approx(0.1)


def test_wsd_stays_then_falls_in_a_straight_line():
    wsd = replace(COSINE, schedule="wsd", decay_fraction=0.2)
    assert {learning_rate(step, 100, wsd) for step in range(10, 81)} == {1.0}
    assert learning_rate(90, 100, wsd) == pytest.approx(0.55)
    assert learning_rate(100, 100, wsd) == pytest.approx(0.1)


def test_constant_stays():
    constant = replace(COSINE, schedule="constant", warmup_steps=0)
    assert {learning_rate(step, 100, constant) for step in range(1, 101)} == {1.0}


def test_the_shortest_runs_have_a_learning_rate():
    for schedule in ("cosine", "wsd", "constant"):
        for steps in (1, 2, 3):
            for warmup in range(steps + 1):
                settings = replace(COSINE, schedule=schedule, warmup_steps=warmup)
                rates = [learning_rate(step, steps, settings) for step in range(1, steps + 1)]
                assert all(0 < rate <= 1 for rate in rates), (schedule, steps, warmup, rates)


def test_weight_decay_leaves_norms_alone():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.RMSNorm(4))
    optimizer, _ = build_optimizer(model, Optimizer(weight_decay=0.3), ("foreach",))
    decay = {tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {(4, 4): 0.3, (4,): 0.0}


@pytest.mark.parametrize("asked, got", [("auto", "fused"), ("foreach", "foreach"), ("loop", "loop"), ("fused", "fused")])
def test_every_implementation_takes_the_same_step(asked, got):
    def step(implementation):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, bias=False)
        optimizer, chosen = build_optimizer(model, Optimizer(implementation=implementation), ("fused", "foreach", "loop"))
        set_learning_rate(optimizer, 0.01)
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        return model.weight.detach(), chosen

    weight, chosen = step(asked)
    assert chosen == got
    torch.testing.assert_close(weight, step("loop")[0], rtol=1e-6, atol=1e-7)


def test_an_implementation_that_the_device_lacks_is_refused():
    with pytest.raises(RecipeError, match="got 'fused', allowed on this device: auto, foreach, loop"):
        build_optimizer(torch.nn.Linear(2, 2), Optimizer(implementation="fused"), ("foreach", "loop"))
