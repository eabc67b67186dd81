"""Qwen3, dense: a decoder of pre-norm blocks with grouped-query attention and a SwiGLU feed-forward network.

- RMSNorm before each half of a block, before the output projection, and per head on queries and keys
- rotary position embeddings in Hugging Face's half-split layout, so published weights need no permutation
- no biases; the output projection is the embedding itself in the small sizes

Shape suffixes: B batch, T tokens, D model, N query heads, K key/value heads, H head, F feed-forward, V vocabulary.

Source: https://huggingface.co/docs/transformers/model_doc/qwen3 and the Qwen3 technical report, arXiv:2505.09388, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.qwen3.config import Qwen3Config

IGNORE_INDEX = -100
"""Label of a position that is not predicted."""
LOSS_CHUNK_TOKENS = 512
"""Tokens whose logits are computed at a time."""


class RotaryEmbedding(nn.Module):
    """The fp32 table of rotary angles, cosines beside sines. It stays fp32 when the model around it is cast."""

    table_T2H: Tensor

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim, self.theta, self.max_seq_len = config.head_dim, config.rope_theta, config.max_seq_len
        self.register_buffer("table_T2H", self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Return the table, [max_seq_len, 2, head_dim]: cosines twice over, and sines with a first half of negative sign."""
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        positions = torch.arange(self.max_seq_len, device=device, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        if self.table_T2H.dtype != torch.float32:  # model.to(bfloat16): angles would keep three digits
            self.table_T2H = self.compute(self.table_T2H.device)
        return self

    def forward(self, seq_len: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, broadcastable to [B, T, heads, head_dim]."""
        rows = self.table_T2H[:seq_len] if positions_BT is None else self.table_T2H[positions_BT]
        return rows[..., 0:1, :], rows[..., 1:2, :]


class _RMSNorm(torch.autograd.Function):
    """y = x / rms(x) * weight. Keeps x and one number per row; as separate operators it would keep four tensors like x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        mean_square = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = torch.rsqrt(mean_square + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        grad32, normalised = grad.float(), x.float() * scale
        grad_weight = (grad32 * normalised).flatten(0, -2).sum(0)
        grad_normalised = grad32 * weight
        # Growing x along itself changes nothing: that part of the gradient is taken out.
        along = (grad_normalised * normalised).mean(-1, keepdim=True)
        grad_x = torch.addcmul(grad_normalised, normalised, along, value=-1) * scale
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32.

    Returns its input's type, or under autocast the type of the matrix products: the projections that share the result would
    otherwise each cast it again.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square over the last axis and scale it by weight, as RMSNorm does."""
    y = _RMSNorm.apply(x, weight, eps)
    device_type = x.device.type
    return y.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else y


def rotate(x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of each head by its position's angle, in fp32."""
    first, second = x_BTNH.split(x_BTNH.shape[-1] // 2, dim=-1)
    return torch.addcmul(x_BTNH * cos, torch.cat((second, first), dim=-1), sin).to(x_BTNH.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_kv_heads != config.num_heads
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTNH = rotate(self.q_norm(self.wq(x_BTD).view(heads)), cos, sin)
        k_BTKH = rotate(self.k_norm(self.wk(x_BTD).view(heads)), cos, sin)
        v_BTKH = self.wv(x_BTD).view(heads)
        y_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BTKH.transpose(1, 2),
            v_BTKH.transpose(1, 2),
            attn_mask=mask_B1TT,
            is_causal=mask_B1TT is None,
            enable_gqa=self.grouped,
        )
        return self.wo(y_BNTH.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer network."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One transformer block. All blocks are alike, so compiling one serves all."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask_B1TT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, mask_B1TT)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class OutputProjection(nn.Module):
    """From hidden states to logits or, with labels, straight to the loss: all logits at once would be the largest tensor."""

    weight: Tensor

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, x_BTD: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        if labels_BT is None:
            return F.linear(x_BTD, self.weight)
        return sum_of_cross_entropies(x_BTD, self.weight, labels_BT)


def sum_of_cross_entropies(
    x_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, split_logits: Callable[[Tensor], Tensor] = lambda logits: logits
) -> Tensor:
    """Return the cross entropy summed over all labels that are not IGNORE_INDEX, [].

    A few hundred tokens at a time: their logits stay in cache and need no large block of memory of their own.

    Args:
        split_logits: where this rank has some rows of weight_VD only, turns its logits [C, V] into the distributed whole.
    """
    total = x_BTD.new_zeros((), dtype=torch.float32)
    for x_CD, labels_C in zip(
        x_BTD.flatten(0, 1).split(LOSS_CHUNK_TOKENS), labels_BT.flatten().split(LOSS_CHUNK_TOKENS), strict=True
    ):
        logits_CV = split_logits(F.linear(x_CD, weight_VD).float())
        total = total + F.cross_entropy(logits_CV, labels_C, reduction="sum", ignore_index=IGNORE_INDEX)
    return total


class Qwen3(nn.Module):
    """The whole model. Build it under ``torch.device("meta")``, then `materialise` it."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.rope = RotaryEmbedding(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = OutputProjection(config.dim, config.vocab_size)
        self.tie()

    def tie(self) -> None:
        """Share the embedding with the output projection, where the size says so."""
        if self.config.tied:
            self.output.weight = self.tok_embeddings.weight

    def materialise(self, device: torch.device) -> None:
        """Give a meta-device model real, uninitialised storage, each rank its shards: restores the tie and the rotary table."""
        self.to_empty(device=device)
        self.tie()
        self.rope.table_T2H = self.rope.compute(device)

    def initialisation(self) -> Iterator[tuple[nn.Parameter, float | None]]:
        """Yield each parameter with the standard deviation of its normal(0, std) at the start; None: all ones.

        Qwen's own: every matrix alike, every norm one.
        """
        for parameter in self.parameters():
            yield parameter, None if parameter.dim() == 1 else self.config.init_std

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V], or with labels the cross entropy summed over all labels that are not IGNORE_INDEX.

        Args:
            positions_BT: position of each token for the rotary embedding. None: its index.
            documents_BT: index of the packed document that each token belongs to; tokens of different documents do not
                attend to each other. None: plain causal attention.
        """
        cos, sin = self.rope(tokens_BT.shape[1], positions_BT)
        mask_B1TT = None if documents_BT is None else document_mask(documents_BT)
        x_BTD = self.tok_embeddings(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, cos, sin, mask_B1TT)
        return self.output(self.norm(x_BTD), labels_BT)


def document_mask(documents_BT: Tensor) -> Tensor:
    """Return the boolean attention mask [B, 1, T, T] in which a token sees itself and its own document before it."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()[:, None]
