"""Chips, physical cores and logical cores of a Trainium host: what a rank drives is one logical core.

A chip has several physical cores (NeuronCores); a logical core is one or two of them (LNC). The three are always told apart.
"""

from __future__ import annotations

import os
import re

from backends.checks import Check

PHYSICAL_CORES = {"Trainium2": 8, "Trainium3": 8}
"""NeuronCores of each chip that TorchNeuron supports. Source: the chip pages that the peak table cites."""

RANKS_ON_A_HOST = {"Trainium1": ((1, 2, 8, 16), 32)}
"""Numbers of ranks that a chip's runtime takes, and the one whose multiples it takes too; others fail late. No rule is known
for a chip that is not listed.

Source: https://github.com/huggingface/optimum-neuron/issues/619, a report about Trainium1, not AWS's documentation.
"""

CHIPS_OF = {"trn2.3xlarge": 1, "trn2.48xlarge": 16, "trn2u.48xlarge": 16}
"""Trainium2 chips of each instance type.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/trn2-arch.html
"""

DEFAULT_LNC = 2
"""Physical cores in a logical core unless set otherwise, on Trainium2 and Trainium3.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-features/logical-neuroncore-config.html
"""


def logical_core_config() -> tuple[int | None, str]:
    """Physical cores in each logical core, 1 or 2, and who says so. None: the variable holds something else."""
    for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
        if (value := os.environ.get(name)) is not None:
            return (int(value), name) if value in ("1", "2") else (None, f"{name}={value} is neither 1 nor 2")
    return DEFAULT_LNC, "AWS's documented default"


def logical_cores(chip: str | None, num_chips: int) -> tuple[int | None, str]:
    """Logical cores of this host that a launch may use, and who says so. None: nothing does.

    Args:
        chip: name from the peak table. None: not reported; the chips that TorchNeuron supports have equally many cores.
        num_chips: 0: not known.
    """
    asked = os.environ.get("NEURON_RT_NUM_CORES", "0")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked), f"NEURON_RT_NUM_CORES={asked}"
    physical, lnc = PHYSICAL_CORES.get(chip or "Trainium2"), logical_core_config()[0]
    if not num_chips or physical is None or lnc is None or "NEURON_RT_VISIBLE_CORES" in os.environ:
        return None, "not known"
    cores = num_chips * physical
    chips = f"{num_chips} chip{'s' if num_chips > 1 else ''}"
    return cores // lnc, f"{chips}, {cores} physical cores, {cores // lnc} logical cores at LNC={lnc}"


def problem_with_ranks(local_ranks: int, chip: str | None, num_chips: int) -> str | None:
    """Return why so many ranks cannot run on this host, in one sentence, else None.

    Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/training/torchtitan/troubleshooting.html: creating the
    process group fails if ranks and cores are not equally many.
    """
    few, multiple = RANKS_ON_A_HOST.get(chip or "", ((), 1))
    if local_ranks not in few and local_ranks % multiple:
        allowed = f"{', '.join(map(str, few))} or a multiple of {multiple}"
        return f"ranks on this host: got {local_ranks}, allowed on {chip}: {allowed}; start another number of ranks"
    cores, source = logical_cores(chip, num_chips)
    if local_ranks == 1 or cores is None or local_ranks == cores:
        return None
    fewer = f", or use fewer cores: NEURON_RT_NUM_CORES={local_ranks}" if local_ranks < cores else ""
    allowed = f"{cores}, one for each logical core ({source})"
    return f"ranks on this host: got {local_ranks}, allowed: {allowed}; start {cores} ranks{fewer}"


def check_cores(local_ranks: int, chip: str | None, num_chips: int) -> Check:
    """Compare the ranks of this host with its logical cores; chips, physical and logical cores are named apart."""
    cores, source = logical_cores(chip, num_chips)
    if cores is None:
        return Check("cores", "warning", f"logical cores: {source}", "name the machine: --instance trn2.48xlarge")
    if problem := problem_with_ranks(local_ranks, chip, num_chips):
        return Check("cores", "failure", f"{local_ranks} ranks on {source}", problem.rpartition("; ")[2])
    return Check("cores", "ok", f"{local_ranks} ranks on {source}")


def check_logical_core_config() -> Check:
    """Compare the size of a logical core that the runtime takes with the one that the compiler is told."""
    lnc, source = logical_core_config()
    if lnc is None:
        return Check("LNC", "failure", source, "set NEURON_LOGICAL_NC_CONFIG to 1 or 2, or unset it")
    told = re.search(r"(?:^|\s)(?:--logical-nc-config|--lnc|-lnc)[= ](\S+)", os.environ.get("NEURON_CC_FLAGS", ""))
    if told and told[1] != str(lnc):
        text = (
            f"the runtime takes {lnc} physical cores as one logical core ({source}), the compiler {told[1]} (NEURON_CC_FLAGS)"
        )
        return Check("LNC", "failure", text, f"say the same twice: NEURON_LOGICAL_NC_CONFIG={told[1]}")
    return Check("LNC", "ok", f"{lnc} physical cores in a logical core ({source})")
