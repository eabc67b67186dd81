"""Sizes of Qwen3. Torch-free, so that a recipe can be checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MixerShape:
    """What one block's sequence mixer costs: read by the FLOP count, which knows formulas for `kind` attention only."""

    kind: str
    num_heads: int
    head_dim: int
    window: int | None = None
    """Keys that a query sees at most. None: all before it."""


@dataclass(frozen=True)
class Qwen3Config:
    """Dimensions of one dense Qwen3.

    Source: the `config.json` of each checkpoint under huggingface.co/Qwen.
    """

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    tied: bool
    """Whether the output projection is the embedding."""
    max_seq_len: int = 40_960
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of every linear and embedding weight at initialisation (Qwen's `initializer_range`)."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {self.num_kv_heads}, allowed: a divisor of num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, allowed: an even number (rotary embeddings turn pairs)")

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied output projection is counted once."""
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.dim * (2 * q_dim + 2 * kv_dim) + 2 * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        head = 0 if self.tied else self.num_embedding_parameters
        return self.num_embedding_parameters + self.num_layers * block + self.dim + head

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab_size * self.dim

    @property
    def mixers(self) -> tuple[MixerShape, ...]:
        """The sequence mixer of each block, in order."""
        return (MixerShape("attention", self.num_heads, self.head_dim),) * self.num_layers


def _qwen3(dim: int, num_layers: int, num_heads: int, ffn_dim: int, *, tied: bool) -> Qwen3Config:
    """Return a published size: all of them share 8 kv heads, head_dim 128 and the vocabulary."""
    return Qwen3Config(dim, num_layers, num_heads, 8, 128, ffn_dim, 151_936, tied)


def tiny(config: Qwen3Config) -> Qwen3Config:
    """Return a network of the same kind with few small layers, which four ranks can still split."""
    return replace(config, dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=16, ffn_dim=192, vocab_size=4_096)


def check_layout(config: Qwen3Config, tensor_parallel_degree: int) -> list[str]:
    """Return what keeps this network from being split over so many tensor-parallel ranks, one sentence each."""
    degree = tensor_parallel_degree
    sizes = {"num_kv_heads": config.num_kv_heads, "ffn_dim": config.ffn_dim, "vocab_size": config.vocab_size}
    return [
        f"parallel.tensor_parallel_degree: got {degree}, allowed: a divisor of {name} = {size:,}; lower it"
        for name, size in sizes.items()
        if size % degree
    ]


FLAVORS = {
    "tiny": Qwen3Config(64, 2, 4, 2, 32, 192, 256, tied=False, max_seq_len=4_096),
    "tiny_tied": Qwen3Config(64, 2, 4, 2, 32, 192, 256, tied=True, max_seq_len=4_096),
    "debug": Qwen3Config(256, 8, 8, 4, 32, 768, 4_096, tied=False, max_seq_len=4_096),
    #            dim layers heads   ffn
    "0.6B": _qwen3(1_024, 28, 16, 3_072, tied=True),
    "1.7B": _qwen3(2_048, 28, 16, 6_144, tied=True),
    "4B": _qwen3(2_560, 36, 32, 9_728, tied=True),
    "8B": _qwen3(4_096, 36, 32, 12_288, tied=False),
    "14B": _qwen3(5_120, 40, 40, 17_408, tied=False),
    "32B": _qwen3(5_120, 64, 64, 25_600, tied=False),
}
