"""A tape of encoded documents, and the fixed-shape batches that are cut from it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that is not predicted: the default of torch's cross entropy, and what the models expect."""


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass. Shapes are [batch, tokens], integers are int64."""

    tokens: Tensor
    labels: Tensor
    """The token after each one; IGNORE_INDEX where none is predicted."""
    num_valid_tokens: int
    """Labels that count. A number of the host's, so that nobody waits for the device to learn it."""
    positions: Tensor | None = None
    """Position of each token in its document and row. None: its index in the row."""
    documents: Tensor | None = None
    """Number of each token's document within the batch. None: documents are not told apart."""

    @property
    def num_tokens(self) -> int:
        """All positions, those without a label included."""
        return self.tokens.numel()

    def to(self, device: torch.device, pin_memory: bool = False) -> Batch:
        """Return the batch on a device.

        Args:
            pin_memory: copy from page-locked memory, without waiting for the copy to end.
        """
        moved = {}
        for name in ("tokens", "labels", "positions", "documents"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensor = tensor.pin_memory() if pin_memory else tensor
                moved[name] = tensor.to(device, non_blocking=pin_memory)
        return replace(self, **moved)


def pack(pieces: list[list[int]], batch_size: int, seq_len: int, isolate_documents: bool) -> Batch:
    """Cut batch_size x seq_len + 1 tokens, given as the pieces of successive documents, into a batch."""
    tape = torch.tensor([token for piece in pieces for token in piece])
    shape = (batch_size, seq_len)
    # Cloned: tokens and labels would otherwise be views of the same memory.
    tokens, labels = tape[:-1].view(shape), tape[1:].clone().view(shape)
    if not isolate_documents:
        return Batch(tokens, labels, num_valid_tokens=labels.numel())

    lengths = torch.tensor([len(piece) for piece in pieces])
    owners = torch.repeat_interleave(torch.arange(len(pieces)), lengths)
    documents = owners[:-1].view(shape)
    labels[owners[1:].view(shape) != documents] = IGNORE_INDEX
    columns = torch.arange(seq_len).expand(shape)
    starts = torch.zeros(shape, dtype=torch.int64)
    starts[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], columns[:, 1:], 0)
    positions = columns - starts.cummax(dim=1).values
    return Batch(tokens, labels, int((labels != IGNORE_INDEX).sum()), positions, documents)


@dataclass(frozen=True)
class EncodedDocument:
    """One document on the tape, and its place in the data."""

    tokens: list[int]
    epoch: int = 0
    number: int = 0
    """Place among the rank's documents of that epoch."""


class Tape:
    """Encoded documents end to end."""

    def __init__(self, offset: int = 0):
        self.documents: deque[EncodedDocument] = deque()
        self.offset = offset
        """Tokens of the first document that have been taken."""
        self.length = -offset
        """Tokens that can still be taken."""

    def append(self, document: EncodedDocument) -> None:
        self.documents.append(document)
        self.length += len(document.tokens)

    def take(self, count: int) -> list[list[int]]:
        """Remove `count` tokens and return them with the one that follows, as pieces of successive documents."""
        pieces, wanted, begin = [], count + 1, self.offset
        for document in self.documents:
            pieces.append(document.tokens[begin : begin + wanted])
            wanted, begin = wanted - len(pieces[-1]), 0
            if not wanted:
                break
        self.length -= count
        self.offset += count
        while self.offset >= len(self.documents[0].tokens):
            self.offset -= len(self.documents.popleft().tokens)
        return pieces
