"""Whose fault an exception is: a collective fails on every rank when one of them dies, and says so in words of its own."""

from __future__ import annotations

import traceback

from training.record import RunFailed

# How the errors of gloo, NCCL, Neuron's runtime and torch's store read when the other side is gone or late.
_SIGNS = (
    "gloo",
    "nccl",
    "nrt_",
    "processgroup",
    "collective",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "tcpstore",
    "socket",
    "connection",
    "broken pipe",
    "timed out",
)

_OWN = ("OutOfMemoryError", "TorchDynamoException")
"""A rank's own, even where they are raised inside a collective's code or quote a graph that has collectives in it."""


def may_be_collateral(error: BaseException) -> bool:
    """Return whether another rank may have caused `error`: a collective's error, or a launcher's signal to the survivors."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, RunFailed):
            return False  # it knows its own reason
        if any(kind.__name__ in _OWN for kind in type(link).__mro__):
            return False
        if isinstance(link, KeyboardInterrupt | ConnectionError):
            return True
        if isinstance(link, RuntimeError) and _is_of_a_collective(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def _is_of_a_collective(error: RuntimeError) -> bool:
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):  # torch.distributed.DistError
        return True
    if any(sign in str(error).lower() for sign in _SIGNS):
        return True
    innermost = traceback.extract_tb(error.__traceback__)[-3:]
    return any("/torch/distributed/" in frame.filename for frame in innermost)


def cause_in_one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, with its type where the message does not speak for itself.

    A line that ends in a colon only announces the next one, as torch's compiler does with what a backend raised.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))])
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    ours = type(error).__module__.startswith(("training", "recipes"))
    return text if ours and text else f"{type(error).__name__}: {text}".removesuffix(": ")
