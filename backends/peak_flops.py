"""Peak FLOP/s of accelerators for dense matrix products, each with where the number comes from.

A peak is looked up by the exact name of the chip. A chip that is not listed has no peak here: it never borrows the number of
one with a similar name. Where two conventions are in use, both are listed and the usual one comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTYPES = ("bfloat16", "float32")
"""Types that matrix products run in. float32 is true float32, as torch's default precision "highest" asks: not TF32."""


@dataclass(frozen=True)
class Peak:
    """One peak in FLOP/s, always dense: no structured sparsity is counted."""

    chip: str
    dtype: str
    """One of DTYPES."""
    flops: float
    per: Literal["chip", "logical core", "device"]
    """What delivers it. A rank computes on one "device" or one "logical core"; a "chip" may hold several ranks."""
    convention: str
    source: str
    """URL of the page that prints the number (or the per-unit number it is a multiple of), or how it was measured."""
    measured: bool = False


_ARCHITECTURE = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/"
_NKI = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/guides/architecture/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_BLACKWELL_ULTRA = "https://resources.nvidia.com/en-us-blackwell-architecture/blackwell-ultra-datasheet"


def _trainium(
    chip: str, cores: int, bf16: tuple[float, float], fp32: tuple[float, float], core_page: str, page: str
) -> list[Peak]:
    """Both conventions of one chip.

    Args:
        bf16: TFLOP/s of one core's TensorEngine, and of the whole chip as its page prints it. The chip page is a little
            higher than the sum of its TensorEngines.
        fp32: the same two for float32.
    """
    rows: list[Peak] = []
    for dtype, (core, whole) in (("bfloat16", bf16), ("float32", fp32)):
        convention = f"TensorEngine: {cores} cores x {core} TFLOP/s"
        rows.append(Peak(chip, dtype, round(cores * core) * 1e12, "chip", convention, core_page))
        rows.append(Peak(chip, dtype, whole * 1e12, "chip", "AWS chip page", page))
    return rows


def _gpu(chip: str, bf16: float, fp32: float, source: str) -> list[Peak]:
    """The two peaks of one GPU, in TFLOP/s. NVIDIA prints bf16 with sparsity on most pages; half of it is the dense peak."""
    return [
        Peak(chip, "bfloat16", bf16 * 1e12, "device", "dense tensor core", source),
        Peak(chip, "float32", fp32 * 1e12, "device", "CUDA cores, not TF32", source),
    ]


PEAKS: tuple[Peak, ...] = (
    *_trainium("Trainium1", 2, (92, 190), (23, 47.5), _NKI + "trainium_inferentia2_arch.html", _ARCHITECTURE + "trainium.html"),
    # 632 TFLOP/s is the bf16 denominator that TorchTitan's published Trainium2 figures use.
    *_trainium("Trainium2", 8, (79, 667), (20, 181), _ARCHITECTURE + "neuron-core-v3.html", _ARCHITECTURE + "trainium2.html"),
    *_trainium("Trainium3", 8, (79, 671), (20, 183), _ARCHITECTURE + "neuron-core-v4.html", _ARCHITECTURE + "trainium3.html"),
    *_gpu("A100", 312, 19.5, _NVIDIA + "a100/"),
    *_gpu("H100 SXM", 989.4, 66.9, _HOPPER),
    *_gpu("H100 PCIe", 756, 51.2, _HOPPER),
    *_gpu("H100 NVL", 835, 60, _NVIDIA + "h100/"),  # 1,671 with sparsity
    *_gpu("H200", 989, 67, _NVIDIA + "h200/"),  # 1,979 with sparsity
    *_gpu("B200", 2250, 75, _NVIDIA + "hgx/"),  # HGX B200, eight GPUs: 36 PFLOP/s with sparsity, 600 TFLOP/s
    *_gpu("GB200", 2500, 80, _NVIDIA + "gb200-nvl72/"),  # 72 GPUs: 360 PFLOP/s with sparsity, 5,760 TFLOP/s
    *_gpu("B300", 2250, 75, _NVIDIA + "hgx/"),  # HGX B300, eight GPUs: 36 PFLOP/s with sparsity, 600 TFLOP/s
    *_gpu("GB300", 2500, 80, _BLACKWELL_ULTRA),
)

ALIASES: dict[str, tuple[str, ...]] = {
    "Trainium1": ("AWS Trainium", "trn1"),
    "Trainium2": ("AWS Trainium2", "trn2"),
    "Trainium3": ("AWS Trainium3", "trn3"),
    "A100": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
    "H100 SXM": ("NVIDIA H100 80GB HBM3",),
    "H100 PCIe": ("NVIDIA H100 PCIe",),
    "H100 NVL": ("NVIDIA H100 NVL",),
    "H200": ("NVIDIA H200",),
    "B200": ("NVIDIA B200",),
    "GB200": ("NVIDIA GB200",),
    "B300": ("NVIDIA B300 SXM6 AC",),
    "GB300": ("NVIDIA GB300",),
}
"""Other exact names of each chip: what the drivers report, and what people type."""


def _key(name: str) -> str:
    return " ".join(name.split()).casefold()


_CHIP_OF = {_key(name): chip for chip, names in ALIASES.items() for name in (chip, *names)}


def table_name(name: str | None) -> str | None:
    """The name under which the table lists a chip. None: it does not.

    Args:
        name: the table's own name or an alias; letter case and blanks around words do not matter.
    """
    return _CHIP_OF.get(_key(name)) if name else None


def peaks_for(chip: str | None, dtype: str) -> list[Peak]:
    """The listed peaks of one chip, the usual convention first. Empty: the chip or its peak in this type is unknown."""
    listed = table_name(chip)
    return [peak for peak in PEAKS if peak.chip == listed and peak.dtype == dtype]
