"""Whether a run reproduces a published one: field by field, and only where the two did the same work on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.peak_flops import peaks_for
from ledger.claims import Claim, Value
from ledger.runs import Run, chip, usual_mfu

REPRODUCED, NOT_REPRODUCED, CANNOT_TELL = "reproduced", "not reproduced", "cannot tell"

WORK = {
    # fact of a claim: where a record says it
    "device": "environment.device",
    "world_size": "work.world_size",
    "parameters": "work.parameters",
    "dtype": "work.dtype",
    "seq_len": "work.seq_len",
    "tokens_per_step": "work.tokens_per_step",
    "tensor_parallel_degree": "work.layout.tensor_parallel_degree",
    "data_parallel_shard_degree": "work.layout.data_parallel_shard_degree",
    "activation_checkpointing": "work.layout.activation_checkpointing",
}
FIGURES = {
    "tokens_per_second": "timing.steady.tokens_per_second",
    "first_step_seconds": "timing.first_step_seconds",
    "compile_seconds": "compile.compile_seconds",
}


@dataclass(frozen=True)
class Fact:
    """One thing that must be the same."""

    name: str
    claimed: object
    status: str
    """published or inferred."""
    found: object
    """None: the record does not say."""

    @property
    def differs(self) -> bool:
        return self.claimed != self.found


@dataclass(frozen=True)
class Finding:
    """One figure."""

    name: str
    claimed: float
    found: float | None
    tolerance: float | None
    """Share that it may be off by."""
    verdict: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What a run says of a claim."""

    claim: Claim
    mode: str
    facts: list[Fact]
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        """Reproduced if all that was published is; not reproduced if anything certainly is not; else it cannot be told."""
        verdicts = {finding.verdict for finding in self.findings}
        if NOT_REPRODUCED in verdicts:
            return NOT_REPRODUCED
        return REPRODUCED if verdicts == {REPRODUCED} else CANNOT_TELL


def judge(run: Run, claim: Claim) -> Verdict:
    """Hold a run against the row of a claim that has its mode."""
    mode = run.text("identity.recipe.run.mode") or "unknown"
    facts = [
        Fact(name, known.value, known.status, chip(run) if name == "chip" else run.get(WORK[name]))
        for name, known in claim.work.items()
        if (name in WORK or name == "chip") and known.value is not None
    ]
    reason = _why_not(run, claim, mode, facts)
    figures = claim.rows.get(mode) or next(iter(claim.rows.values()))
    return Verdict(claim, mode, facts, [_finding(run, claim, name, figure, reason) for name, figure in figures.items()])


def _why_not(run: Run, claim: Claim, mode: str, facts: list[Fact]) -> str | None:
    """Say why nothing can be told at all. None: it can."""
    if not run.record:
        return f"{run.state}: {run.problem}"
    different = {fact.name: fact for fact in facts if fact.differs}
    if (device := different.get("device")) is not None:
        return f"other device ({device.found}, published: {device.claimed})"
    if (chip := different.get("chip")) is not None:
        return f"other chip ({chip.found}, published: {chip.claimed})"
    if mode not in claim.rows:
        return f"other mode ({mode}, published: {', '.join(claim.rows)})"
    if different:
        rows = (f"{fact.name} {fact.found}, {fact.status}: {fact.claimed}" for fact in different.values())
        return f"other work ({'; '.join(rows)})"
    return None


def _finding(run: Run, claim: Claim, name: str, figure: Value, reason: str | None) -> Finding:
    found = usual_mfu(run) if name == "mfu" else run.number(FIGURES[name]) if name in FIGURES else None
    allowed = claim.tolerance.get(name)
    tolerance = None if allowed is None else allowed.value

    def finding(verdict: str, because: str) -> Finding:
        return Finding(name, figure.value, found, tolerance, verdict, because)

    if reason is not None:
        return finding(CANNOT_TELL, reason)
    if name not in FIGURES and name != "mfu":
        return finding(CANNOT_TELL, "run records do not hold this figure")
    if found is None:
        return finding(CANNOT_TELL, "the record does not have it")
    if run.get("timing.deterministic") is True:
        return finding(CANNOT_TELL, "a deterministic run's speed is not quoted")
    off = found / figure.value - 1
    within = tolerance is not None and abs(off) <= tolerance
    return finding(REPRODUCED if within else NOT_REPRODUCED, f"{off:+.1%}, allowed: {tolerance or 0:.0%} either way")


@dataclass(frozen=True)
class Derived:
    """The MFU that a claim's throughput gives under one convention."""

    numerator: str
    flops_per_token: float
    peak: str
    peak_flops_per_chip: float
    mfu: float
    claimed: float

    @property
    def is_the_claimed_one(self) -> bool:
        """Whether it rounds to the published figure."""
        return f"{self.mfu:.4f}" == f"{self.claimed:.4f}"


def rederive(claim: Claim, mode: str) -> Iterator[Derived]:
    """Yield the MFU of a claim under every numerator and every known peak of its chip; nothing where too little is known."""
    rate, claimed, chips = claim.figure(mode, "tokens_per_second"), claim.figure(mode, "mfu"), claim.fact("chips")
    if rate is None or claimed is None or chips is None:
        return
    for numerator, flops in _flops_per_token(claim):
        for peak in peaks_for(claim.fact("chip"), claim.fact("dtype")):
            share = flops * rate / (chips * peak.flops)
            yield Derived(numerator, flops, peak.convention, peak.flops, share, claimed)


def _flops_per_token(claim: Claim) -> Iterator[tuple[str, float]]:
    """Yield each convention of training.flops, from the claim's own counts; of an untied model, as Qwen3-32B is."""
    parameters, embedding = claim.fact("parameters"), claim.fact("embedding_parameters")
    attention, seq_len = claim.fact("attention_flops_per_token_and_position"), claim.fact("seq_len")
    if None in (parameters, embedding, attention, seq_len):
        return
    multiplied = 6 * (parameters - embedding)
    yield "torchtitan", multiplied + attention * seq_len
    yield "causal-half", multiplied + attention * seq_len / 2
    yield "6N", 6 * parameters
