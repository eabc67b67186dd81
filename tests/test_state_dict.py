"""Weights go to Hugging Face's folders and back without a change, and a folder that is not this model is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config as ReferenceConfig
from transformers import Qwen3ForCausalLM as Reference

from models import ModelError
from models.qwen3 import state_dict_adapter as adapter
from models.qwen3.config import FLAVORS, Qwen3Config
from models.qwen3.model import Qwen3
from training.weights import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightsError,
    export_weights,
    load_weights,
)

UNTIED, TIED = FLAVORS["tiny"], FLAVORS["tiny_tied"]
TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

both_sizes = pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])


def build(config: Qwen3Config, seed: int = 0) -> Qwen3:
    """Return a model in which every tensor is random, the norms too."""
    model = Qwen3(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1, generator=generator)
    return model


def export(model: Qwen3, folder: Path, **kwargs: Any) -> Path:
    export_weights(model, adapter, folder, **{"step": 3, **kwargs})
    return folder


def load(config: Qwen3Config, folder: Path) -> Qwen3:
    model = build(config, seed=99)
    load_weights(model, adapter, folder)
    return model


def rewrite(folder: Path, state: dict[str, Tensor]) -> None:
    """Replace a folder's weights by these."""
    (folder / SINGLE_FILE).unlink()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / SINGLE_FILE)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- there and back -------------------------------------------------------------------------------------------------------


@both_sizes
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 100_000], ids=["single", "sharded"])
def test_ours_to_transformers(config: Qwen3Config, max_shard_bytes: int, tmp_path: Path):
    model = build(config)
    folder = export(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert (folder / INDEX_FILE).exists() == (max_shard_bytes == 100_000)
    reference, info = Reference.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert reference.dtype == torch.float32
    assert (reference(TOKENS).logits - model(TOKENS)).abs().max() < 1e-5


@both_sizes
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"], ids=["single", "sharded"])
def test_transformers_to_ours(config: Qwen3Config, max_shard_size: str, tmp_path: Path):
    reference = Reference(ReferenceConfig(**adapter.hf_config(config)))
    reference.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_size == "100KB")
    assert (load(config, tmp_path)(TOKENS) - reference(TOKENS).logits).abs().max() < 1e-5


@both_sizes
def test_ours_to_ours_is_exact(config: Qwen3Config, tmp_path: Path):
    model = build(config)
    loaded = load(config, export(model, tmp_path / "out"))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert (loaded.output.weight is loaded.tok_embeddings.weight) == config.tied


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_flavor_goes_through_us_byte_for_byte(flavor: str, dtype: torch.dtype, tmp_path: Path):
    """Hugging Face to ours to Hugging Face: the flavor's own keys (depth, tied or not), at tiny width."""
    sizes = {"dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 24, "vocab_size": 64}
    config = dataclasses.replace(FLAVORS[flavor], **sizes)
    reference = Reference(ReferenceConfig(**adapter.hf_config(config))).to(dtype)
    reference.save_pretrained(tmp_path / "theirs")
    ours = export(load(config, tmp_path / "theirs"), tmp_path / "ours", dtype=dtype)
    theirs, returned = load_file(tmp_path / "theirs" / SINGLE_FILE), load_file(ours / SINGLE_FILE)
    assert returned.keys() == theirs.keys() and (HEAD in returned) != config.tied
    for name, tensor in theirs.items():
        assert returned[name].dtype == dtype and returned[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


def test_bf16_file_fills_fp32_parameters(tmp_path: Path):
    model = build(UNTIED)
    loaded = load(UNTIED, export(model, tmp_path / "out", dtype=torch.bfloat16))
    assert loaded.output.weight.dtype == torch.float32
    assert torch.equal(loaded.output.weight, model.output.weight.bfloat16().float())


@both_sizes
def test_to_hf_and_from_hf_are_inverse(config: Qwen3Config):
    state = build(config).state_dict()
    back = adapter.from_hf(adapter.to_hf(state, config), config)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] or torch.equal(back[name], state[name]) for name in state)


# --- tied sizes -----------------------------------------------------------------------------------------------------------


def test_d11_tied_checkpoint_loads_with_or_without_the_head(tmp_path: Path):
    model = build(TIED)
    without, with_head = export(model, tmp_path / "without"), export(model, tmp_path / "with")
    state = load_file(with_head / SINGLE_FILE)
    rewrite(with_head, state | {HEAD: state[EMBEDDING]})
    assert HEAD in load_file(with_head / SINGLE_FILE)
    assert torch.equal(load(TIED, without)(TOKENS), load(TIED, with_head)(TOKENS))
    assert torch.equal(load(TIED, without)(TOKENS), model(TOKENS))


def test_tied_checkpoint_with_a_head_of_its_own_is_refused(tmp_path: Path):
    folder = export(build(TIED), tmp_path / "out")
    state = load_file(folder / SINGLE_FILE)
    rewrite(folder, state | {HEAD: state[EMBEDDING] + 1e-3})
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight, and this size is tied"):
        load(TIED, folder)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 100_000], ids=["single", "sharded"])
def test_d12_tied_export_holds_real_tensors_only(max_shard_bytes: int, tmp_path: Path):
    folder = export(build(TIED), tmp_path / "out", max_shard_bytes=max_shard_bytes)
    names = {}
    for path in folder.glob("*.safetensors"):
        names |= dict.fromkeys(load_file(path), path.name)  # load_file reads the data of each, not only the header
    assert set(names) == set(adapter.key_map(TIED))
    assert HEAD not in names
    if (folder / INDEX_FILE).exists():
        index = json.loads((folder / INDEX_FILE).read_text())
        assert index["weight_map"] == names
        assert index["metadata"]["total_size"] == 4 * TIED.num_parameters


def test_broken_tie_is_not_exported(tmp_path: Path):
    model = build(TIED)
    model.output.weight = torch.nn.Parameter(model.output.weight.detach() + 1)
    with pytest.raises(ModelError, match=r"output.weight differs from tok_embeddings.weight"):
        export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_d13_untied_checkpoint_without_head_is_refused(tmp_path: Path):
    folder = export(build(UNTIED), tmp_path / "out")
    state = load_file(folder / SINGLE_FILE)
    del state[HEAD]
    rewrite(folder, state)
    model = build(UNTIED)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"lm_head.weight: missing, and this size is untied"):
        load_weights(model, adapter, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- every key is consumed ------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_keys_are_named():
    state = adapter.to_hf(build(UNTIED).state_dict(), UNTIED)
    for name in list(state):
        if "mlp" in name:
            del state[name]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(1)
    with pytest.raises(ModelError) as caught:
        adapter.from_hf(state, UNTIED)
    message = str(caught.value)
    assert "missing model.layers.0.mlp.gate_proj.weight, " in message
    assert "and 3 more" in message
    assert "unexpected model.layers.0.self_attn.q_proj.bias" in message


def test_state_that_is_not_the_models_is_not_exported():
    with pytest.raises(ModelError, match=r"unexpected layers.1.attention.k_norm.weight, .* and 8 more"):
        adapter.to_hf(build(UNTIED).state_dict(), dataclasses.replace(UNTIED, num_layers=1))


def test_wrong_shape_is_refused(tmp_path: Path):
    folder = export(build(UNTIED), tmp_path / "out")
    state = load_file(folder / SINGLE_FILE)
    rewrite(folder, state | {EMBEDDING: state[EMBEDDING][:250]})
    with pytest.raises(WeightsError, match=r"tok_embeddings.weight: got shape \[250, 64\] .* allowed: \[256, 64\]"):
        load(UNTIED, folder)


# --- config.json ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS)
def test_config_there_and_back(flavor: str):
    config = FLAVORS[flavor]
    written = adapter.hf_config(config, "bfloat16")
    assert adapter.config_from_hf(written) == config
    reference = ReferenceConfig(**written)
    assert reference.rope_parameters == {"rope_theta": config.rope_theta, "rope_type": "default"}
    assert reference.dtype in (torch.bfloat16, "bfloat16")
    assert reference.tie_word_embeddings == config.tied
    assert adapter.config_from_hf(reference.to_dict()) == config  # version 5 spells rope_theta and dtype its own way


def test_published_config_is_read():
    published = {  # Qwen/Qwen3-8B, as written by transformers 4.51
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }  # fmt: skip
    assert adapter.config_from_hf(published) == FLAVORS["8B"]


def test_every_differing_field_is_named():
    found = adapter.hf_config(dataclasses.replace(UNTIED, rope_theta=5e6, vocab_size=300, max_seq_len=9, init_std=0.1))
    with pytest.raises(ModelError) as caught:
        adapter.check_config(found, UNTIED)
    message = str(caught.value)
    assert "vocab_size: 300 in the checkpoint, 256 in the recipe" in message
    assert "rope_theta: 5000000.0 in the checkpoint, 1000000.0 in the recipe" in message
    assert "max_seq_len" not in message
    assert "init_std" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type: got 'llama', allowed: 'qwen3'"),
        ({"attention_bias": True}, "attention_bias: got True, allowed: False"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window: got True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type: got 'yarn', allowed: 'default'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type: got 'linear'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_architecture_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError) as caught:
        adapter.config_from_hf(adapter.hf_config(UNTIED) | changes)
    assert message in str(caught.value)


def test_config_without_a_size_is_refused():
    found = adapter.hf_config(UNTIED)
    del found["hidden_size"]
    with pytest.raises(ModelError, match="missing hidden_size"):
        adapter.config_from_hf(found)


def test_checkpoint_of_another_size_is_refused_before_its_weights_are_read(tmp_path: Path):
    folder = export(build(UNTIED), tmp_path / "out")
    edit_config(folder, tie_word_embeddings=True)
    (folder / SINGLE_FILE).write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="tied: True in the checkpoint, False in the recipe"):
        load(UNTIED, folder)
