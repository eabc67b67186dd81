"""Model FLOPs: how many floating-point operations one trained token costs, under declared conventions.

MFU = flops_per_token x tokens/s / (devices x peak). A multiply and an add count as two; a backward pass as two forward
passes; recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NUMERATORS = ("torchtitan", "causal-half", "6N")


class MixerShape(Protocol):
    """What one block's sequence mixer says of itself."""

    @property
    def kind(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...


class ModelShape(Protocol):
    """What a model configuration says of itself."""

    @property
    def num_parameters(self) -> int: ...
    @property
    def num_embedding_parameters(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def mixers(self) -> Sequence[MixerShape]: ...


@dataclass(frozen=True)
class FlopCount:
    """FLOPs per trained token under one convention. None comes with the reason."""

    numerator: str
    flops_per_token: float | None
    reason: str | None = None


def count_flops(model: ModelShape, seq_len: int, numerator: str = "torchtitan") -> FlopCount:
    """Count the FLOPs of one trained token.

    Args:
        numerator: `torchtitan`: 6 (N - N_embedding) + 12 L H head_dim S, attention not halved for causality; tied models
            count the output projection once. `causal-half`: the same with the keys that a causal query sees on average.
            `6N`: six per parameter, embedding included, attention left out.

    Raises:
        ValueError: if there is no such numerator.

    Source: Narayanan et al., arXiv:2104.04473, appendix; TorchTitan's get_nparams_and_flops for the first convention.
    """
    if numerator not in NUMERATORS:
        raise ValueError(f"numerator: got {numerator!r}, allowed: {', '.join(NUMERATORS)}")
    unknown = sorted({mixer.kind for mixer in model.mixers if mixer.kind != "attention"})
    if unknown:
        return FlopCount(numerator, None, f"no FLOP formula for sequence mixer {', '.join(unknown)}")
    if numerator == "6N":
        return FlopCount(numerator, 6.0 * model.num_parameters)
    # Looking up an embedding costs no multiplication. A tied matrix multiplies all the same: as the output projection.
    multiplied = model.num_parameters - (0 if model.tied else model.num_embedding_parameters)
    keys = _keys_with_window if numerator == "torchtitan" else _keys_causal
    attention = sum(12 * mixer.num_heads * mixer.head_dim * keys(seq_len, mixer.window) for mixer in model.mixers)
    return FlopCount(numerator, float(6 * multiplied + attention))


def _keys_with_window(seq_len: int, window: int | None) -> float:
    return min(seq_len, window or seq_len)


def _keys_causal(seq_len: int, window: int | None) -> float:
    """Mean number of keys per query: half the sequence, or the window less what its start lacks."""
    width = _keys_with_window(seq_len, window)
    return width - width * width / (2 * seq_len)


def mfu(flops_per_token: float | None, tokens_per_second: float | None, devices: int, peak_flops: float | None) -> float | None:
    """Return model FLOPs utilisation as a share (0.25, not 25), or None where an ingredient is unknown.

    Args:
        tokens_per_second: global, over all devices.
        peak_flops: dense peak of one device in the type of the matrix products, FLOP/s.
    """
    if flops_per_token is None or tokens_per_second is None or peak_flops is None:
        return None
    return flops_per_token * tokens_per_second / (devices * peak_flops)


def implausible(share: float | None) -> str | None:
    """Return a warning where an MFU cannot be right, else None."""
    if share is None or share <= 1.0:
        return None
    return f"MFU of {share:.0%} is more than the device can do: the peak, the FLOP count or the token count is wrong"
