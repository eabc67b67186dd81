"""Which network a recipe names."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from models import FAMILIES, ModelError, load_family, model_config
from models.qwen3.config import FLAVORS
from recipes.base import Model, RecipeError


def test_flavor_without_overrides():
    assert model_config(Model(flavor="0.6B")) == FLAVORS["0.6B"]


def test_overrides_replace_only_what_they_name():
    config = model_config(Model(flavor="8B", num_layers=2, ffn_dim=64, vocab_size=512))
    assert config == dataclasses.replace(FLAVORS["8B"], num_layers=2, ffn_dim=64, vocab_size=512)
    assert config.num_parameters < FLAVORS["8B"].num_parameters


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(family="qwen"), "model.family: got 'qwen', allowed: qwen3; did you mean qwen3?"),
        (Model(family="banana"), "model.family: got 'banana', allowed: qwen3"),
        (Model(flavor="32b"), "did you mean 32B?"),
        (Model(flavor="debugg"), "did you mean debug?"),
        (Model(flavor="6B"), "model.flavor: got '6B', allowed: tiny, tiny_tied, debug, 0.6B, 1.7B, 4B, 8B, 14B, 32B; did"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.family}-{value.flavor}",
)
def test_unknown_name_is_refused_with_the_nearest(model: Model, message: str):
    with pytest.raises(ModelError) as caught:
        model_config(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, RecipeError)


def test_nothing_near_means_no_suggestion():
    with pytest.raises(ModelError) as caught:
        model_config(Model(flavor="zzz"))
    assert "did you mean" not in str(caught.value)


def test_sequence_may_fill_the_rotary_table_and_no_more():
    assert model_config(Model(flavor="tiny"), seq_len=4_096).max_seq_len == 4_096
    with pytest.raises(ModelError, match=r"training.seq_len: got 4,097, allowed: at most 4,096"):
        model_config(Model(flavor="tiny"), seq_len=4_097)


@pytest.mark.parametrize(
    ("overrides", "degree", "message"),
    [
        ({}, 16, "parallel.tensor_parallel_degree: got 16, allowed: a divisor of num_kv_heads = 8; lower it"),
        ({"ffn_dim": 1001}, 2, "a divisor of ffn_dim = 1,001"),
        ({"vocab_size": 1001}, 2, "a divisor of vocab_size = 1,001"),
    ],
)
def test_a_network_that_cannot_be_split_is_refused(overrides: dict[str, int], degree: int, message: str):
    with pytest.raises(ModelError) as caught:
        model_config(Model(flavor="8B", **overrides), 4_096, degree)
    assert message in str(caught.value)
    assert model_config(Model(flavor="32B"), 4_096, 4) == FLAVORS["32B"]


@pytest.mark.parametrize("flavor", ["0.6B", "32B"])
def test_tiny_keeps_the_kind(flavor: str):
    config = model_config(Model(flavor=flavor, tiny=True), 64, 4)
    assert config.num_parameters < 2_000_000
    assert (config.tied, config.rope_theta, config.norm_eps) == (FLAVORS[flavor].tied, 1_000_000.0, 1e-6)
    assert model_config(Model(flavor=flavor, tiny=True, num_layers=3)).num_layers == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_family_has_every_drawer(name: str):
    family = load_family(name)
    with torch.device("meta"):
        model = family.Model(model_config(Model(family=name, flavor="tiny")))
    family.parallelize(model)
    assert family.adapter.key_map(model.config)


def test_unknown_family_cannot_be_loaded():
    with pytest.raises(ModelError, match="did you mean qwen3"):
        load_family("qwen2")


def test_config_refuses_impossible_shapes():
    with pytest.raises(ValueError, match="num_kv_heads: got 3, allowed: a divisor of num_heads = 4"):
        dataclasses.replace(FLAVORS["tiny"], num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim: got 15"):
        dataclasses.replace(FLAVORS["tiny"], head_dim=15)


def test_naming_a_model_costs_no_torch():
    program = "import sys, models; from recipes.base import Model; models.model_config(Model()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
