"""Feed-forward networks that a device which compiles would choke on, each in its own way."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def every_second_element(network: nn.Module, x: Tensor) -> Tensor:
    """Read with a stride."""
    half = x[..., ::2]
    return network.w2(F.silu(network.w1(x)) * network.w3(x)) + half.repeat_interleave(2, dim=-1)


def doubles(network: nn.Module, x: Tensor) -> Tensor:
    """Compute in 64 bits."""
    return network.w2(F.silu(network.w1(x)) * network.w3(x)) + x.double().square().float()


def asks_for_a_value(network: nn.Module, x: Tensor) -> Tensor:
    """Wait for the device."""
    scale = x.sum().item()
    return network.w2(F.silu(network.w1(x)) * network.w3(x)) * scale


def picks_by_value(network: nn.Module, x: Tensor) -> Tensor:
    """Have a shape that depends on values."""
    positive = x[x > 0]
    return network.w2(F.silu(network.w1(x)) * network.w3(x)) * positive.mean()


def prints(network: nn.Module, x: Tensor) -> Tensor:
    """Do what cannot be traced."""
    print("x has", x.shape, file=None, flush=network.training)
    return network.w2(F.silu(network.w1(x)) * network.w3(x))
