"""The Qwen3 network against the reference in transformers, on tiny random configurations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config as ReferenceConfig
from transformers import Qwen3ForCausalLM as Reference

from models.qwen3 import model as qwen3
from models.qwen3.config import FLAVORS, Qwen3Config
from models.qwen3.model import IGNORE_INDEX, Qwen3, document_mask
from models.qwen3.state_dict_adapter import from_hf, hf_config, key_map
from training.initialise import initialise

LOGITS_BOUND = 1e-5
GRADIENT_BOUND = 1e-5
"""Largest difference of one gradient, as a share of that gradient's own largest magnitude."""

SHAPES = {
    # dim 48 = heads x 12, so head_dim 16 or 32 is never dim / heads
    "mha": Qwen3Config(48, 2, 4, 4, 16, 96, 128, tied=False, max_seq_len=64),
    "gqa2_tied": Qwen3Config(48, 3, 4, 2, 32, 80, 128, tied=True, max_seq_len=64),
    "gqa4": Qwen3Config(48, 2, 4, 1, 16, 96, 128, tied=False, max_seq_len=64, rope_theta=10_000.0),
    "gqa4_tied": Qwen3Config(48, 1, 8, 2, 32, 96, 128, tied=True, max_seq_len=64, norm_eps=1e-5),
}
TINY = FLAVORS["tiny"]


def pair(config: Qwen3Config, attention: str = "sdpa") -> tuple[Qwen3, Any]:
    """Return our model and the reference with the same random weights, norms included."""
    torch.manual_seed(1)
    reference = Reference(ReferenceConfig(**hf_config(config), attn_implementation=attention))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(1.0, 0.2) if parameter.dim() == 1 else parameter.normal_(0.0, 0.1)
    ours = Qwen3(config)
    ours.load_state_dict(from_hf(reference.state_dict(), config))
    return ours, reference


def random_tokens(config: Qwen3Config, batch: int = 2, length: int = 33) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


def initialised(config: Qwen3Config, seed: int = 0) -> Qwen3:
    with torch.device("meta"):
        model = Qwen3(config)
    model.materialise(torch.device("cpu"))
    initialise(model.initialisation(), seed=seed)
    return model


# --- parity ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_the_reference(shape: str, attention: str):
    config = SHAPES[shape]
    ours, reference = pair(config, attention)
    tokens, labels = random_tokens(config), random_tokens(config).roll(-1, 1)
    labels[0, -5:] = IGNORE_INDEX

    logits = reference(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens, labels_BT=labels).backward()

    assert (ours(tokens) - logits).abs().max() < LOGITS_BOUND
    mine, theirs = dict(ours.named_parameters()), dict(reference.named_parameters())
    names = key_map(config)
    assert set(names) == set(theirs)
    assert set(names.values()) == set(mine)
    for their_name, our_name in names.items():
        expected = theirs[their_name].grad
        assert (mine[our_name].grad - expected).abs().max() < GRADIENT_BOUND * expected.abs().max(), our_name


def interleaved(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The other rotary layout: turn pairs (2i, 2i + 1)."""
    cos, sin = (half.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for half in (cos, sin))
    even, odd = x_BTNH[..., ::2], x_BTNH[..., 1::2]
    return x_BTNH * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin


def test_wrong_rotary_layout_is_far_outside_the_bound(monkeypatch: pytest.MonkeyPatch):
    ours, reference = pair(SHAPES["gqa4"])
    tokens = random_tokens(ours.config)
    monkeypatch.setattr(qwen3, "rotate", interleaved)
    assert (ours(tokens) - reference(tokens).logits).abs().max() > 1_000 * LOGITS_BOUND


def test_explicit_positions_equal_the_reference():
    ours, reference = pair(SHAPES["mha"])
    tokens = random_tokens(ours.config)
    positions = torch.arange(3, 36).expand(2, -1)
    expected = reference(tokens, position_ids=positions).logits
    assert (ours(tokens, positions_BT=positions) - expected).abs().max() < LOGITS_BOUND


# --- sizes ----------------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_parameter_count(flavor: str):
    config = FLAVORS[flavor]
    with torch.device("meta"):
        ours, reference = Qwen3(config), Reference(ReferenceConfig(**hf_config(config)))
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == config.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert count == PUBLISHED.get(flavor, count)


def test_every_published_size_is_offered():
    assert set(PUBLISHED) <= set(FLAVORS)


# --- the rotary table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotary_table_stays_fp32_when_the_model_is_cast(dtype: torch.dtype):
    model = Qwen3(TINY)
    expected = model.rope.table_T2H.clone()
    model.to(dtype)
    assert model.output.weight.dtype == dtype
    assert model.rope.table_T2H.dtype == torch.float32
    assert torch.equal(model.rope.table_T2H, expected)


@pytest.mark.parametrize("cast_first", [False, True])
def test_rotary_table_is_right_after_materialise(cast_first: bool):
    with torch.device("meta"):
        model = Qwen3(TINY)
    if cast_first:
        model.to(torch.bfloat16)
    model.to_empty(device="cpu")
    assert model.rope.table_T2H.dtype == torch.float32
    model.materialise(torch.device("cpu"))
    assert model.rope.table_T2H.dtype == torch.float32
    assert torch.equal(model.rope.table_T2H, Qwen3(TINY).rope.table_T2H)


def test_rotary_table_is_not_saved():
    assert not [name for name in Qwen3(TINY).state_dict() if "rope" in name]


# --- attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [None, torch.zeros(2, 33, dtype=torch.long)], ids=["causal", "one_document"])
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
def test_attention_kernels_agree(kernel: SDPBackend, documents: Tensor | None):
    ours, _ = pair(SHAPES["gqa2_tied"])
    tokens = random_tokens(ours.config)
    with sdpa_kernel(kernel):
        logits = ours(tokens, documents_BT=documents)
    assert (logits - ours(tokens)).abs().max() < LOGITS_BOUND


def test_isolated_documents_see_nothing_of_each_other():
    ours, _ = pair(SHAPES["gqa4"])
    tokens = random_tokens(ours.config, batch=1, length=30)
    lengths = (7, 12, 11)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = ours(tokens, positions_BT=positions, documents_BT=documents)
    alone = torch.cat([ours(document) for document in tokens.split(lengths, dim=1)], dim=1)
    assert (packed - alone).abs().max() < LOGITS_BOUND
    assert (ours(tokens) - alone)[:, lengths[0] :].abs().max() > 1_000 * LOGITS_BOUND


def test_document_mask_by_hand():
    x, o = True, False
    expected = [[x, o, o, o], [x, x, o, o], [o, o, x, o], [o, o, x, x]]
    mask = document_mask(torch.tensor([[4, 4, 9, 9]]))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[expected]]


# --- initialisation and the tie -------------------------------------------------------------------------------------------


def test_initialisation_is_qwens():
    model = initialised(FLAVORS["debug"])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1.0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.02), name
            assert abs(parameter.mean().item()) < 0.0005, name


def test_initialisation_is_the_seeds():
    first, again, other = (initialised(TINY, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output.weight"], other["output.weight"])


def test_tied_model_is_tied_again_after_materialise():
    config = SHAPES["gqa2_tied"]
    model = initialised(config)
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters

    # The reference, whose tie never broke, shows what both halves of the embedding's gradient add up to.
    constructed, _ = pair(config)
    model.load_state_dict(constructed.state_dict())
    tokens = random_tokens(config)
    for each in (model, constructed):
        each(tokens, labels_BT=tokens.roll(-1, 1)).backward()
    assert torch.equal(model.tok_embeddings.weight.grad, constructed.tok_embeddings.weight.grad)


def test_untied_model_has_two_matrices():
    model = initialised(TINY)
    assert model.output.weight is not model.tok_embeddings.weight
    assert not torch.equal(model.output.weight, model.tok_embeddings.weight)


# --- the loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
def test_bf16_is_finite_with_rows_of_padding(autocast: bool):
    model = initialised(FLAVORS["tiny_tied"])
    if not autocast:
        model.to(torch.bfloat16)
    tokens = random_tokens(TINY)
    documents, labels = torch.zeros_like(tokens), tokens.roll(-1, 1)
    documents[0], labels[0] = -1, IGNORE_INDEX  # a sample of nothing but padding
    documents[1, 20:], labels[1, 19:] = torch.arange(1, 14), IGNORE_INDEX  # tokens that see only themselves
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, documents_BT=documents, labels_BT=labels)
    loss.backward()
    assert loss.isfinite()
    assert loss.item() > 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_no_token_is_fully_masked():
    documents = torch.tensor([[-1, -1, 0, 3, 3, -1]])
    assert document_mask(documents).any(dim=-1).all()


def test_loss_without_any_label_is_zero():
    model = initialised(TINY)
    tokens = random_tokens(TINY)
    loss = model(tokens, labels_BT=torch.full_like(tokens, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_loss_is_the_sum_over_labels():
    model = initialised(TINY)
    tokens = random_tokens(TINY)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORE_INDEX
    picked = model(tokens).log_softmax(-1)[:, :-1].gather(-1, labels[:, :-1, None])
    assert model(tokens, labels_BT=labels).item() == pytest.approx(-picked.sum().item(), rel=1e-5)


def test_tokenizer_may_be_smaller_than_the_vocabulary():
    config = dataclasses.replace(TINY, vocab_size=256)
    model = initialised(config)
    tokens = random_tokens(dataclasses.replace(config, vocab_size=250))
    labels = tokens.roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(tokens, labels_BT=labels) / labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)  # normalised over all 256 entries
    assert losses[-1] < losses[0] - 0.5
