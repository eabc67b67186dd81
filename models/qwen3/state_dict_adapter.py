"""The one place that knows what Hugging Face calls things: parameter names and the fields of config.json.

Both use the half-split rotary layout, so a weight is renamed and never permuted.

Tied sizes: the configuration decides. A checkpoint of a tied size may carry `lm_head.weight` or leave it out, but a copy
that differs from the embedding is refused: transformers then unties the two, so dropping it would be another model. An
untied size without `lm_head.weight` is refused too, because its output projection would stay random.

Source: modeling_qwen3.py and configuration_qwen3.py of transformers 5.24; each config.json under huggingface.co/Qwen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from models import ModelError
from models.qwen3.config import Qwen3Config

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
"""Modules of one block: theirs, ours."""

_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tied",
    "max_position_embeddings": "max_seq_len",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
"""Fields of config.json: theirs, ours."""

_FIXED = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "rope_scaling": None,
}
"""Fields of config.json that this implementation has one value for."""

_WHEN_ABSENT = {
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}
"""What transformers takes for a field that config.json leaves out. A missing size is refused instead."""

_NOT_COMPARED = ("max_seq_len", "init_std")
"""Fields that do not change what given weights compute."""


def key_map(config: Qwen3Config) -> dict[str, str]:
    """Return our name of every parameter by Hugging Face's, in the order of the forward pass."""
    names = {_EMBEDDING: "tok_embeddings.weight"}
    for layer in range(config.num_layers):
        names |= {f"model.layers.{layer}.{theirs}.weight": f"layers.{layer}.{ours}.weight" for theirs, ours in _BLOCK.items()}
    names["model.norm.weight"] = "norm.weight"
    if not config.tied:
        names[_HEAD] = "output.weight"
    return names


def to_hf(state: Mapping[str, Tensor], config: Qwen3Config) -> dict[str, Tensor]:
    """Return our state dict under Hugging Face's names. A tied output projection is left out.

    Raises:
        ModelError: if a parameter is missing, unexpected, or tied in name only.
    """
    state = dict(state)
    if config.tied and "output.weight" in state and "tok_embeddings.weight" in state:
        _require_same("output.weight", state.pop("output.weight"), "tok_embeddings.weight", state["tok_embeddings.weight"])
    names = key_map(config)
    _require_keys("state dict", state, names.values())
    return {theirs: state[ours] for theirs, ours in names.items()}


def from_hf(state: Mapping[str, Tensor], config: Qwen3Config) -> dict[str, Tensor]:
    """Return a Hugging Face state dict under our names; a tied output projection is the embedding itself.

    Raises:
        ModelError: if a parameter is missing or unexpected, or a tied checkpoint has two different matrices.
    """
    state = dict(state)
    if config.tied and _HEAD in state and _EMBEDDING in state:
        _require_same(_HEAD, state.pop(_HEAD), _EMBEDDING, state[_EMBEDDING])
    if not config.tied and _EMBEDDING in state and _HEAD not in state:
        raise ModelError(
            f"{_HEAD}: missing, and this size is untied, so its output projection would stay random; "
            "choose a tied flavor or a complete checkpoint"
        )
    names = key_map(config)
    _require_keys("checkpoint", state, names)
    result = {ours: state[theirs] for theirs, ours in names.items()}
    if config.tied:
        result["output.weight"] = result["tok_embeddings.weight"]
    return result


def hf_config(config: Qwen3Config, dtype: str = "float32") -> dict[str, Any]:
    """Return config.json as the published checkpoints spell it: the form of transformers 4.51, which version 5 still reads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_FIXED,
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
        "torch_dtype": dtype,
    }


def config_from_hf(found: Mapping[str, Any]) -> Qwen3Config:
    """Return the dimensions that a config.json describes, as written by transformers 4 or 5.

    Raises:
        ModelError: if it lacks a size or asks for something that this implementation does not do.
    """
    rope = (found.get("rope_scaling") or {}) | (found.get("rope_parameters") or {})  # version 4, version 5
    values: dict[str, Any] = {**_WHEN_ABSENT, **_FIXED, **found, "rope_scaling": None}
    values["rope_theta"] = rope.get("rope_theta", values["rope_theta"])
    unsupported = [f"{name}: got {values[name]!r}, allowed: {only!r}" for name, only in _FIXED.items() if values[name] != only]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        unsupported.append(f"rope_type: got {rope_type!r}, allowed: 'default'")
    if unsupported:
        raise ModelError(f"config.json describes another network than Qwen3, dense: {'; '.join(unsupported)}")
    _require_keys("config.json", [name for name in values if name in _FIELDS], _FIELDS)
    return Qwen3Config(**{ours: values[theirs] for theirs, ours in _FIELDS.items()})


def check_config(found: Mapping[str, Any], config: Qwen3Config) -> None:
    """Hold a checkpoint's config.json against the model that is to receive its weights.

    Raises:
        ModelError: naming every field that changes the computation, with both values.
    """
    theirs = config_from_hf(found)
    names = [field.name for field in fields(config) if field.name not in _NOT_COMPARED]
    differing = [
        f"{name}: {getattr(theirs, name)} in the checkpoint, {getattr(config, name)} in the recipe"
        for name in names
        if getattr(theirs, name) != getattr(config, name)
    ]
    if differing:
        raise ModelError(f"config.json disagrees with the recipe's model: {'; '.join(differing)}; choose the flavor to match")


def _require_keys(what: str, got: Collection[str], wanted: Iterable[str]) -> None:
    wanted = list(wanted)
    problems = [
        f"{label} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for label, names in (
            ("missing", [name for name in wanted if name not in got]),
            ("unexpected", sorted(set(got) - set(wanted))),
        )
        if names
    ]
    if problems:
        raise ModelError(f"{what} does not hold this model: {'; '.join(problems)}")


def _require_same(name: str, tensor: Tensor, source_name: str, source: Tensor) -> None:
    if tensor is source or (tensor.shape == source.shape and torch.equal(tensor, source.to(tensor.dtype))):
        return
    raise ModelError(
        f"{name} differs from {source_name}, and this size is tied: one matrix serves both; "
        f"choose an untied size, or remove {name} if the embedding is the right one"
    )
