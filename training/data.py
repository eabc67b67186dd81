"""From documents to batches of one fixed shape.

Documents are encoded, laid end to end, and the tape is cut into rows of `seq_len` tokens. A row's labels are its tokens moved
by one, so neighbouring rows share one token and each token is predicted exactly once. The data-parallel ranks take turns on
one tape: any number of them reads the same rows in the same step, and a place in the data does not depend on their number.
Each of them encodes the whole tape for that, half a million tokens a second.

Nothing is padded and nothing dropped: the tape runs on from one epoch into the next. With isolated documents no label crosses
from one document into another: the last token of each, its end token, has none.

Positions: a row is what attention sees, so a row's positions start at 0. With isolated documents they start at 0 again at
each document. A document that a row's end cuts goes on at 0 in the next row, where what came before cannot be seen anyway:
rotary attention depends on distances only, and no position ever reaches `seq_len`, whatever a document's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import get_worker_info

from recipes.base import Recipe
from training.packing import Batch, EncodedDocument, Tape, deal
from training.sources import DataError, DocumentSource, open_source
from training.tokenizer import Notify, TextTokenizer, check_vocabulary, load_tokenizer

NO_LOADER = (
    "PackedBatches cannot be read by a DataLoader: workers would repeat each other's documents and keep the place in the data "
    "to themselves; iterate over it as it is, or wrap it as an IterableDataset with num_workers=0"
)


class PackedBatches(Iterator[Batch]):
    """Training batches of one data-parallel rank, without end: after the last document the next epoch begins.

    Counters are of all ranks together.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: TextTokenizer,
        *,
        seq_len: int,
        local_batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        isolate_documents: bool = False,
    ):
        assert 0 <= rank < world_size
        self.source, self.tokenizer = source, tokenizer
        self.seq_len, self.local_batch_size, self.isolate_documents = seq_len, local_batch_size, isolate_documents
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.tokens_seen = self.valid_tokens_seen = self.documents_seen = 0
        self._start_at(epoch=0, document=0, offset=0)

    def _start_at(self, epoch: int, document: int, offset: int) -> None:
        self.epoch, self._document = epoch, document
        self._tape = Tape(offset)
        self._documents = self._read(epoch, document)

    def _read(self, epoch: int, number: int) -> Iterator[EncodedDocument]:
        """Encode the documents from one place in the data on, epoch after epoch."""
        wanted = self._tokens_at_once + 1
        while True:
            whole_epoch, num_tokens = number == 0, 0
            texts = self.source.training_documents(self.seed, epoch, number)
            for number, text in enumerate(texts, number):  # noqa: B020 - counts on from where it starts
                if text:
                    document = EncodedDocument(self.tokenizer.encode_document(text), epoch, number)
                    num_tokens += len(document.tokens)
                    yield document
            if whole_epoch and num_tokens < wanted:  # would put a document into one batch twice, or find nothing for ever
                raise DataError(
                    f"training.seq_len is beyond the data: one batch on each rank takes {self.world_size} x "
                    f"{self.local_batch_size} x {self.seq_len} + 1 = {wanted} tokens, the training documents hold "
                    f"{num_tokens}; lower training.seq_len or training.local_batch_size, or name more data"
                )
            epoch, number = epoch + 1, 0

    @property
    def _tokens_at_once(self) -> int:
        """Tokens that all ranks together take off the tape at a time."""
        return self.world_size * self.local_batch_size * self.seq_len

    def fill(self) -> None:
        """Encode what the next batch needs. Called before training, it refuses too little data while nothing is built yet."""
        while self._tape.length <= self._tokens_at_once:
            self._tape.append(self._next_document())

    def _next_document(self) -> EncodedDocument:
        try:
            return next(self._documents)
        except BaseException:
            # A generator that raised is finished: asked again, it would look like the end of data that has none.
            self._start_at(self.epoch, self._document, self._tape.offset)
            raise

    def __len__(self) -> NoReturn:
        raise TypeError(NO_LOADER)  # a DataLoader asks for the length before it starts a worker

    def __next__(self) -> Batch:
        if get_worker_info() is not None:
            raise DataError(NO_LOADER)
        self.fill()
        waiting, shape = len(self._tape.documents), (self.local_batch_size, self.seq_len)
        batch = deal(self._tape, shape, self.isolate_documents, self.rank, self.world_size)
        self.documents_seen += waiting - len(self._tape.documents)
        self.tokens_seen += self._tokens_at_once
        self.valid_tokens_seen += batch.num_valid_tokens_of_all_ranks
        self.epoch, self._document = self._tape.documents[0].epoch, self._tape.documents[0].number
        return batch

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a place in the data to mean the same."""
        return {
            "data.fingerprint": self.source.fingerprint,
            "tokenizer.fingerprint": self.tokenizer.fingerprint,
            "data.held_out_every": self.source.data.held_out_every,
            "data.shuffle": self.source.data.shuffle,
            "run.seed": self.seed,
        }

    def _seen(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("tokens_seen", "valid_tokens_seen", "documents_seen")}

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next token and the counters: small, and JSON."""
        return {
            "epoch": self.epoch,
            "document": self._document,
            "offset": self._tape.offset,
            "seen": self._seen(),
            "identity": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the state was taken. Sequence length, batch size and the number of ranks may differ.

        Raises:
            DataError: if the state is of other data or another order.
        """
        for name, value in self._identity().items():
            saved = state["identity"].get(name)
            if saved != value:
                raise DataError(f"cannot resume the data: {name} was {saved!r}, got {value!r}; use the same, or start anew")
        self._start_at(state["epoch"], state["document"], state["offset"])
        for name, count in state["seen"].items():
            setattr(self, name, count)

    def describe(self) -> dict[str, Any]:
        """What is read and how far, for the record. Epochs are counted as begun."""
        return {
            **self.source.describe(),
            "tokenizer": self.tokenizer.describe(),
            "isolate_documents": self.isolate_documents,
            "order": {"shuffle": self.source.data.shuffle, "seed": self.seed, "epoch": self.epoch},
            "epochs": self.epoch + 1,
            **self._seen(),
        }


class HeldOutBatches(Iterator[Batch]):
    """Validation batches of the same source, tokenizer, shape and rank as `train`: the same `num_batches` in every round.

    They are encoded once, here, so that too little data is refused before anything is paid for. The ranks take turns on one
    tape here too, so that all of them have the same number of batches.

    Raises:
        DataError: if the held-out documents do not fill the batches, with both numbers.
    """

    def __init__(self, train: PackedBatches, num_batches: int):
        batch_size, seq_len, rank, world_size = train.local_batch_size, train.seq_len, train.rank, train.world_size
        count = batch_size * seq_len
        self.batches: list[Batch] = []
        tape, num_tokens, num_documents = Tape(), 0, 0
        texts = filter(None, train.source.held_out_documents())
        while len(self.batches) < num_batches:
            while tape.length <= count * world_size:
                text = next(texts, None)
                if text is None:
                    raise DataError(
                        f"validation.num_batches: got {num_batches}, allowed: at most {len(self.batches)}, as one takes "
                        f"{world_size} x {batch_size} x {seq_len} = {count * world_size} tokens over all ranks, the last "
                        f"one 1 more, and the {num_documents} held-out documents hold {num_tokens}; lower it, the batch or "
                        f"data.held_out_every ({train.source.data.held_out_every}), or name more documents"
                    )
                document = EncodedDocument(train.tokenizer.encode_document(text))
                num_documents, num_tokens = num_documents + 1, num_tokens + len(document.tokens)
                tape.append(document)
            self.batches.append(deal(tape, (batch_size, seq_len), train.isolate_documents, rank, world_size))
        self.reset()

    def reset(self) -> None:
        """Begin the next round."""
        self._round = iter(self.batches)

    def __next__(self) -> Batch:
        return next(self._round)


def build_data(
    recipe: Recipe, vocab_size: int, *, rank: int = 0, world_size: int = 1, notify: Notify = print
) -> tuple[PackedBatches, HeldOutBatches | None]:
    """Build the training batches of one rank for an embedding of `vocab_size` rows, and the validation batches if the recipe
    validates. Whatever is wrong with the data or the tokenizer is a DataError.
    """
    tokenizer = load_tokenizer(recipe.data, notify)
    check_vocabulary(tokenizer, vocab_size)
    train = PackedBatches(
        open_source(recipe.data),
        tokenizer,
        seq_len=recipe.training.seq_len,
        local_batch_size=recipe.training.local_batch_size,
        seed=recipe.run.seed,
        rank=rank,
        world_size=world_size,
        isolate_documents=recipe.data.isolate_documents,
    )
    train.fill()
    return train, HeldOutBatches(train, recipe.validation.num_batches) if recipe.validation.every_steps else None
