"""FLOPs per token and MFU against published figures and hand arithmetic."""

from dataclasses import dataclass, replace

import pytest

from models.qwen3.config import FLAVORS, MixerShape
from training.flops import NUMERATORS, count_flops, implausible, mfu

QWEN3_32B = FLAVORS["32B"]
TERA = 1e12


@dataclass(frozen=True)
class Shape:
    """A network described by hand."""

    num_parameters: int
    num_embedding_parameters: int
    tied: bool
    mixers: tuple[MixerShape, ...]


def test_qwen3_32b_at_4096_costs_what_torchtitan_says():
    assert count_flops(QWEN3_32B, 4_096).flops_per_token == 217_675_069_440
    assert count_flops(QWEN3_32B, 8_192).flops_per_token == 243_444_873_216


@pytest.mark.parametrize(
    "tokens_per_second, peak_per_chip, percent",
    [(11_099, 632, 23.89), (14_156, 632, 30.47), (11_099, 667, 22.64), (14_156, 667, 28.87)],
)
def test_published_mfu_is_reproduced(tokens_per_second, peak_per_chip, percent):
    flops = count_flops(QWEN3_32B, 4_096).flops_per_token
    assert round(flops / 1e9, 2) == 217.68
    share = mfu(flops, tokens_per_second, devices=16, peak_flops=peak_per_chip * TERA)
    assert round(100 * share, 2) == percent


def test_mfu_by_chip_and_by_rank_agree():
    """Case A10: global tokens over all devices; 64 ranks of a quarter chip are 16 chips."""
    flops = count_flops(QWEN3_32B, 4_096).flops_per_token
    by_chip = mfu(flops, 11_099, devices=16, peak_flops=632 * TERA)
    assert mfu(flops, 11_099, devices=64, peak_flops=158 * TERA) == pytest.approx(by_chip)
    assert mfu(flops, 2 * 700, devices=2, peak_flops=158 * TERA) == mfu(flops, 700, devices=1, peak_flops=158 * TERA)


@pytest.mark.parametrize("flavor, gigaflops", [("0.6B", 6.395), ("1.7B", 13.142), ("4B", 31.383)])
def test_a_tied_head_is_counted_once(flavor, gigaflops):
    """Case A6: looking up an embedding is free, multiplying by the same matrix as the output projection is not."""
    assert round(count_flops(FLAVORS[flavor], 4_096).flops_per_token / 1e9, 3) == gigaflops


def test_conventions_differ_where_they_say_they_do():
    """Case A8: halving attention for causality is another numerator, not another truth."""
    counts = {name: count_flops(QWEN3_32B, 4_096, name).flops_per_token for name in NUMERATORS}
    attention = 12 * 64 * 64 * 128 * 4_096
    assert counts["torchtitan"] - counts["causal-half"] == attention / 2
    assert counts["6N"] == 6 * 32_762_123_264
    assert counts["torchtitan"] == 6 * (32_762_123_264 - 777_912_320) + attention
    with pytest.raises(ValueError, match=r"got '8N', allowed: torchtitan, causal-half, 6N"):
        count_flops(QWEN3_32B, 4_096, "8N")


def test_a_windowed_layer_is_counted_with_its_window():
    """Case A7: window 8 in every second layer at seq_len 32 drops those layers' attention to a quarter."""
    full = MixerShape("attention", num_heads=4, head_dim=32)
    shape = Shape(1_000, 100, False, (full,) * 4)
    windowed = replace(shape, mixers=(full, replace(full, window=8)) * 2)
    per_layer = 12 * 4 * 32 * 32
    assert count_flops(shape, 32).flops_per_token == 6 * 900 + 4 * per_layer
    assert count_flops(windowed, 32).flops_per_token == 6 * 900 + 2 * per_layer + 2 * per_layer / 4
    wide = replace(shape, mixers=(replace(full, window=64),) * 4)
    assert count_flops(wide, 32) == count_flops(shape, 32)  # a window beyond the sequence changes nothing
    assert count_flops(wide, 32, "causal-half") == count_flops(shape, 32, "causal-half")


def test_an_unknown_mixer_has_no_count_and_says_why():
    """Case A9: no formula for this block, no MFU."""
    shape = Shape(1_000, 100, False, (MixerShape("attention", 4, 32), MixerShape("gated-delta", 4, 32)))
    count = count_flops(shape, 32)
    assert count.flops_per_token is None and "gated-delta" in count.reason
    assert mfu(count.flops_per_token, 1_000.0, 1, 1e12) is None


def test_unknown_ingredients_give_no_mfu():
    """Case A13: an unknown chip does not borrow a known peak."""
    assert mfu(1e9, 1_000.0, 1, None) is None
    assert mfu(1e9, None, 1, 1e12) is None


def test_more_than_the_device_can_do_is_called_out():
    assert implausible(mfu(1e9, 1_330, 1, 1e12)) is not None
    assert "133%" in implausible(1.33)
    assert implausible(0.99) is None and implausible(None) is None
