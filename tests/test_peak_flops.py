"""The peak table: every number has a type and a source, and no chip gets the number of another."""

from __future__ import annotations

import pytest

from backends.cpu import CpuBackend
from backends.neuron import NeuronBackend
from backends.peak_flops import ALIASES, DTYPES, PEAKS, peaks_for, table_name
from tests.fake_backend import FakeBackend


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: f"{peak.chip} {peak.dtype} {peak.convention}")
def test_each_row_is_complete(peak):
    assert 1e13 < peak.flops < 1e16
    assert peak.dtype in DTYPES
    assert peak.per in ("chip", "device")
    assert peak.convention
    assert peak.source.startswith("https://")
    assert not peak.measured
    assert peak in peaks_for(peak.chip, peak.dtype)


def test_each_chip_has_both_types_and_bfloat16_is_the_faster():
    for chip in ALIASES:
        bf16, fp32 = (peaks_for(chip, dtype) for dtype in DTYPES)
        assert bf16[0].flops > 2 * fp32[0].flops
        assert len({peak.convention for peak in bf16}) == len(bf16)


def test_each_name_belongs_to_one_chip():
    names = [name.casefold() for chip, aliases in ALIASES.items() for name in (chip, *aliases)]
    assert len(names) == len(set(names))
    assert {peak.chip for peak in PEAKS} == set(ALIASES)


@pytest.mark.parametrize(
    ("chip", "dtype", "teraflops"),
    [
        ("Trainium1", "bfloat16", [184, 190]),
        ("Trainium1", "float32", [46, 47.5]),
        ("Trainium2", "bfloat16", [632, 667]),
        ("Trainium2", "float32", [160, 181]),
        ("Trainium3", "bfloat16", [632, 671]),
        ("Trainium3", "float32", [160, 183]),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", [312]),
        ("NVIDIA A100-PCIE-40GB", "float32", [19.5]),
        ("NVIDIA H100 80GB HBM3", "bfloat16", [989.4]),
        ("NVIDIA H100 80GB HBM3", "float32", [66.9]),  # not TF32's 494.7
        ("NVIDIA H100 PCIe", "bfloat16", [756]),
        ("NVIDIA H100 NVL", "bfloat16", [835]),
        ("NVIDIA H200", "bfloat16", [989]),
        ("NVIDIA B200", "bfloat16", [2250]),
        ("NVIDIA GB200", "bfloat16", [2500]),
        ("NVIDIA B300 SXM6 AC", "bfloat16", [2250]),
        ("NVIDIA GB300", "bfloat16", [2500]),
    ],
)
def test_numbers(chip, dtype, teraflops):
    assert [peak.flops / 1e12 for peak in peaks_for(chip, dtype)] == teraflops


def test_the_two_trainium2_conventions_are_named():
    tensor_engine, chip_page = peaks_for("Trainium2", "bfloat16")
    assert tensor_engine.convention == "TensorEngine: 8 cores x 79 TFLOP/s"
    assert tensor_engine.source.endswith("/neuron-core-v3.html")
    assert chip_page.convention == "AWS chip page"
    assert chip_page.source.endswith("/trainium2.html")


@pytest.mark.parametrize("name", ["nvidia h200", "  NVIDIA   H200 ", "h200"])
def test_case_and_blanks_do_not_matter(name):
    assert table_name(name) == "H200"


UNLISTED = """
H100 / NVIDIA H100 / NVIDIA H100 80GB HBM3 MIG 1g.10gb / NVIDIA H200 NVL / NVIDIA H20 / NVIDIA H800 / NVIDIA GH200 480GB
NVIDIA A100 / NVIDIA A800-SXM4-80GB / NVIDIA L40S / NVIDIA B200 X / Trainium / Trainium4 / AMD EPYC / AMD Instinct MI300X
"""


@pytest.mark.parametrize("name", [None, "", " ", *UNLISTED.replace("\n", "/").strip("/").split("/")])
def test_a_chip_that_is_not_listed_borrows_nothing(name):
    assert table_name(name) is None
    assert peaks_for(name, "bfloat16") == []


def test_unlisted_type_is_unknown():
    assert peaks_for("H200", "float16") == []


def test_h200_is_not_h100():
    (h200,), (h100,) = peaks_for("NVIDIA H200", "bfloat16"), peaks_for("NVIDIA H100 80GB HBM3", "bfloat16")
    assert (h200.chip, h100.chip) == ("H200", "H100 SXM")
    assert h200.source != h100.source


@pytest.mark.parametrize(("lnc", "shares"), [("2", [158e12, 166.75e12]), ("1", [79e12, 83.375e12])])
def test_a_neuron_rank_has_its_share_of_the_chip(monkeypatch, lnc, shares):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    peaks = NeuronBackend().peaks("bfloat16", "Trainium2")
    assert [peak.flops for peak in peaks] == shares
    assert [peak.source for peak in peaks] == [peak.source for peak in peaks_for("Trainium2", "bfloat16")]
    assert {peak.per for peak in peaks} == {"logical core"}
    assert all(f"LNC={lnc}" in peak.convention for peak in peaks)


def test_a_backend_takes_no_peak_of_a_whole_chip_or_of_another_kind_of_device():
    assert super(FakeBackend, FakeBackend()).peaks("bfloat16", "Trainium2") == []
    assert NeuronBackend().peaks("bfloat16", "H200") == []
    assert CpuBackend().peaks("bfloat16", "H200") == []


def test_peak_does_not_follow_what_else_is_in_the_machine(monkeypatch, tmp_path):
    """Source: https://github.com/pytorch/torchtitan/pull/4800 (an H100 in the output of lspci decided the peak)."""
    for tool in ("lspci", "nvidia-smi", "neuron-ls"):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3'\ntouch {tmp_path}/called\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("backends.cpu_peak.measure", lambda dtype: (3e11, 512))
    assert [peak.flops for peak in CpuBackend().peaks("bfloat16")] == [3e11]
    assert NeuronBackend().peaks("bfloat16") == []
    assert NeuronBackend().peak_flops("bfloat16", "Trainium2").flops == 158e12
    assert [peak.flops for peak in peaks_for("NVIDIA B200", "bfloat16")] == [2250e12]
    assert not (tmp_path / "called").exists()
