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
    num_valid_tokens_of_all_ranks: int
    """The same, summed over the batches that the data-parallel ranks get at the same time."""
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


def deal(tape: Tape, shape: tuple[int, int], isolate_documents: bool, rank: int = 0, world_size: int = 1) -> Batch:
    """Take a batch for every rank off the tape, and return this rank's."""
    count = shape[0] * shape[1]
    hands = [tape.take(count) for _ in range(world_size)]
    # With isolated documents the last token of each has no label, unless it is what follows the batch.
    unlabelled = sum(len(pieces) - 1 for pieces in hands) if isolate_documents else 0
    return pack(hands[rank], *shape, isolate_documents, num_valid_tokens_of_all_ranks=count * world_size - unlabelled)


def pack(
    pieces: list[list[int]],
    batch_size: int,
    seq_len: int,
    isolate_documents: bool,
    num_valid_tokens_of_all_ranks: int | None = None,
) -> Batch:
    """Cut batch_size x seq_len + 1 tokens, given as the pieces of successive documents, into a batch.

    Args:
        num_valid_tokens_of_all_ranks: None: there is one rank.
    """
    tape = torch.tensor([token for piece in pieces for token in piece])
    shape = (batch_size, seq_len)
    # Cloned: tokens and labels would otherwise be views of the same memory.
    tokens, labels = tape[:-1].view(shape), tape[1:].clone().view(shape)
    everybody = num_valid_tokens_of_all_ranks
    if not isolate_documents:
        return Batch(tokens, labels, labels.numel(), labels.numel() if everybody is None else everybody)

    lengths = torch.tensor([len(piece) for piece in pieces])
    owners = torch.repeat_interleave(torch.arange(len(pieces)), lengths)
    documents = owners[:-1].view(shape)
    labels[owners[1:].view(shape) != documents] = IGNORE_INDEX
    columns = torch.arange(seq_len).expand(shape)
    starts = torch.zeros(shape, dtype=torch.int64)
    starts[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], columns[:, 1:], 0)
    positions = columns - starts.cummax(dim=1).values
    valid = int((labels != IGNORE_INDEX).sum())
    return Batch(tokens, labels, valid, valid if everybody is None else everybody, positions, documents)


@dataclass(frozen=True)
class EncodedDocument:
    """One document on the tape, and its place in the data."""

    tokens: list[int]
    epoch: int = 0
    number: int = 0
    """Place in the order of that epoch."""


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
