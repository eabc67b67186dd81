"""What is said about speed, against hand arithmetic and a clock that does what it is told."""

import math

import pytest
import torch

from tests.fake_backend import FakeBackend, FakeClock
from training.metrics import BreakEven, Meter, Step, Window, break_even, first_non_finite, steady


def run_steps(seconds, log_every, *, tokens=100, valid=100, disturbed=()):
    """Drive a meter as the loop does; step n takes seconds[n - 1]."""
    clock = FakeClock()
    device = FakeBackend(clock=clock)
    meter = Meter(device.synchronize, clock)
    windows, disturbed_by = [], None
    meter.begin()
    for step, duration in enumerate(seconds, start=1):
        clock.advance(duration)
        meter.add(step, torch.tensor(1.0), torch.tensor(2.0), 1e-3, tokens, valid)
        if step in disturbed:
            disturbed_by = "compiled"
        if step in (1, len(seconds)) or step % log_every == 0:
            windows.append(meter.end(disturbed_by))
            disturbed_by = None
    return windows, device


def test_first_step_is_kept_out_of_the_steady_speed():
    """Case A16: 100 s for step 1, 1 s for each other step."""
    windows, _ = run_steps([100.0] + [1.0] * 19, log_every=5)
    assert windows[0].seconds_per_step == 100.0
    summary = steady(windows)
    assert summary is not None
    assert summary.seconds_per_step_median == 1.0 and summary.seconds_per_step_max == 1.0
    assert summary.steps == 19


@pytest.mark.parametrize("log_every", [1, 3, 7, 10])
def test_every_window_divides_by_the_steps_that_are_in_it(log_every):
    """Case A20: 7 s a step reads 7 s on every line, for step 1 and for a short last window too."""
    windows, _ = run_steps([7.0] * 23, log_every)
    assert [window.seconds_per_step for window in windows] == [7.0] * len(windows)
    assert [step.step for window in windows for step in window.steps] == list(range(1, 24))


def test_device_is_waited_for_at_window_edges_only():
    _, device = run_steps([1.0] * 20, log_every=5)
    assert len(device.called("synchronize")) == 1 + 5  # the start, step 1, and steps 5, 10, 15, 20


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rate_counts_the_whole_optimizer_step(accumulation):
    """Cases A11 and A13: the same global batch in one or four micro-batches has the same tokens/s."""
    global_batch, micro_batch = 4_096, 4_096 // accumulation
    windows, _ = run_steps([2.0] * 5, log_every=5, tokens=micro_batch * accumulation, valid=global_batch)
    assert steady(windows).tokens_per_second == 2_048.0


def test_padding_is_reported_apart():
    """Case A15: a quarter of the positions is padding."""
    windows, _ = run_steps([1.0] * 5, log_every=5, tokens=400, valid=300)
    summary = steady(windows)
    assert summary.valid_tokens_per_second / summary.tokens_per_second == 0.75


def test_window_with_a_late_compile_is_not_steady():
    """Case A18: the speed with and without what was compiled in between."""
    windows, _ = run_steps([10.0] + [1.0] * 5 + [31.0] + [1.0] * 13, log_every=5, disturbed=(1, 7))
    summary = steady(windows)
    assert summary.seconds_per_step_max == 1.0
    assert [window.disturbed_by for window in windows] == ["compiled", None, "compiled", None, None]
    assert max(window.seconds_per_step for window in windows[1:]) == 7.0


def test_no_undisturbed_window_means_no_steady_speed():
    windows, _ = run_steps([1.0], log_every=5)
    assert steady(windows) is None
    windows, _ = run_steps([1.0] * 4, log_every=5, disturbed=(3,))
    assert steady(windows) is None


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
def test_first_non_finite_step_is_named(loss, norm):
    good, bad = Step(4, 1.0, 1.0, 1e-3, 8, 8), Step(5, loss, norm, 1e-3, 8, 8)
    assert first_non_finite([good, bad, good]) is bad
    assert first_non_finite([good]) is None


def test_break_even_of_the_published_run():
    """The 16-chip Qwen3-32B run at 65,536 tokens a step: compiled is ahead from the 57th step in all."""
    eager_step, compiled_step = 65_536 / 11_099, 65_536 / 14_156
    assert (round(eager_step, 3), round(compiled_step, 3)) == (5.905, 4.630)
    crossing = break_even(184.6, eager_step, 255.7, compiled_step)
    assert crossing is not None and crossing.ahead_from_step == 57

    def total(first, step, steps):
        return first + (steps - 1) * step

    assert round(total(184.6, eager_step, 20), 1) == 296.8 and round(total(255.7, compiled_step, 20), 1) == 343.7
    assert round(total(184.6, eager_step, 100), 1) == 769.2 and round(total(255.7, compiled_step, 100), 1) == 714.0
    assert total(184.6, eager_step, 56) < total(255.7, compiled_step, 56)
    assert total(184.6, eager_step, 57) > total(255.7, compiled_step, 57)


def test_break_even_at_its_edges():
    """Case A19: 10 s against 30 s, then 2 s against 1 s a step: even after 20 further steps."""
    assert break_even(10, 2, 30, 1) == BreakEven(20.0, 22)
    assert break_even(10, 1, 30, 1) is None
    assert break_even(10, 1, 30, 2) is None
    assert break_even(10, 2, 5, 1) == BreakEven(0.0, 1)


def test_window_rates():
    steps = tuple(Step(n, 1.0, 1.0, 1e-3, 50, 25) for n in (2, 3))
    window = Window(steps, seconds=4.0)
    assert (window.seconds_per_step, window.tokens_per_second, window.valid_tokens_per_second) == (2.0, 25.0, 12.5)
