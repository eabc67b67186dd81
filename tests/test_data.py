"""Batches: what is in them, in which order they come, and that a place among them can be reached again."""

import gc
import json
import subprocess
import sys
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from models.qwen3 import FLAVORS
from models.qwen3.model import IGNORE_INDEX as MODEL_IGNORE_INDEX
from models.qwen3.model import Qwen3
from recipes.base import Data, Recipe, Training, Validation
from training.data import HeldOutBatches, PackedBatches, build_data
from training.initialise import initialise
from training.packing import IGNORE_INDEX, Batch, pack
from training.sources import DataError, IndexedSource
from training.tokenizer import END_OF_TEXT, TextTokenizer

END = 0


def number_words():
    """Reads "7 8 9" as the ids 7, 8, 9; the end token is 0."""
    tokenizer = Tokenizer(models.WordLevel({END_OF_TEXT: END} | {str(n): n for n in range(1, 4000)}, unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


TOKENIZER = TextTokenizer(number_words(), "numbers", END_OF_TEXT)


class Listed(IndexedSource):
    """Documents from a list; remembers which were read."""

    def __init__(self, texts, **options):
        super().__init__(Data(**{"held_out_every": 10_000, "shuffle": False, **options}))
        self.texts, self.num_documents, self.reads = texts, len(texts), []
        self.description, self.fingerprint = "a list", str(hash(tuple(texts)))

    def read(self, index):
        self.reads.append(index)
        return self.texts[index]


def documents(*lengths):
    """Texts of so many words each. No word occurs twice."""
    numbers = iter(range(1, 4000))
    return [" ".join(str(n) for n in islice(numbers, length)) for length in lengths]


def packed(texts, seq_len=4, local_batch_size=2, seed=0, rank=0, world_size=1, isolate_documents=False, **data):
    return PackedBatches(
        Listed(texts, **data),
        TOKENIZER,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        seed=seed,
        rank=rank,
        world_size=world_size,
        isolate_documents=isolate_documents,
    )


def take(batches, count):
    return list(islice(batches, count))


def same(left: Batch, right: Batch):
    tensors = ("tokens", "labels", "positions", "documents")
    pairs = [(getattr(left, name), getattr(right, name)) for name in tensors]
    return left.num_valid_tokens == right.num_valid_tokens and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


def flat(batches):
    return torch.cat([batch.tokens.flatten() for batch in batches]).tolist()


# --- what is in a batch -----------------------------------------------------------------------------------------------


def test_the_ignored_label_is_the_models():
    assert IGNORE_INDEX == MODEL_IGNORE_INDEX == torch.nn.CrossEntropyLoss().ignore_index


def test_plain_packing_by_hand():
    first, second = take(packed(documents(5, 2, 8, 30)), 2)
    assert first.tokens.tolist() == [[1, 2, 3, 4], [5, END, 6, 7]]
    assert first.labels.tolist() == [[2, 3, 4, 5], [END, 6, 7, END]]
    assert second.tokens.tolist() == [[END, 8, 9, 10], [11, 12, 13, 14]]
    assert (first.positions, first.documents) == (None, None)
    assert first.num_tokens == first.num_valid_tokens == 8


def test_isolated_documents_by_hand():
    first, second = take(packed(documents(5, 2, 8, 30), isolate_documents=True), 2)
    assert first.tokens.tolist() == [[1, 2, 3, 4], [5, END, 6, 7]]
    assert first.labels.tolist() == [[2, 3, 4, 5], [END, IGNORE_INDEX, 7, END]]
    assert first.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert first.documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert (first.num_tokens, first.num_valid_tokens) == (8, 7)
    assert second.labels.tolist() == [[IGNORE_INDEX, 9, 10, 11], [12, 13, 14, 15]]
    assert second.positions.tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_and_in_one_shape(lengths, seq_len, batch_size, isolated):
    lengths.append(batch_size * seq_len)
    batches = take(packed(documents(*lengths), seq_len, batch_size, isolate_documents=isolated), 6)
    tape = [token for text in documents(*lengths) for token in TOKENIZER.encode_document(text)] * 10
    count = 6 * batch_size * seq_len
    assert flat(batches) == tape[:count]
    labels = torch.cat([batch.labels.flatten() for batch in batches]).tolist()
    expected = tape[1 : count + 1]
    if isolated:
        expected = [IGNORE_INDEX if token == END else label for token, label in zip(tape, expected, strict=False)]
    assert labels == expected
    for batch in batches:
        tensors = [batch.tokens, batch.labels] + ([batch.positions, batch.documents] if isolated else [])
        assert {(tensor.dtype, tuple(tensor.shape)) for tensor in tensors} == {(torch.int64, (batch_size, seq_len))}
        assert batch.num_valid_tokens == int((batch.labels != IGNORE_INDEX).sum())


@pytest.mark.parametrize("isolated", [False, True])
def test_c20_a_document_longer_than_a_row_restarts_at_the_row(isolated):
    """47 words and the end token at seq_len 32: 0 to 31, then 0 to 15 for the rest, never a position of 32 or more."""
    batch = next(packed(documents(47, 100), seq_len=32, isolate_documents=isolated))
    if not isolated:
        assert batch.positions is None  # each token's index in its row
        return
    assert batch.positions.tolist() == [list(range(32)), [*range(16), *range(16)]]
    assert batch.documents[1].tolist() == [0] * 16 + [1] * 16


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10))
@settings(max_examples=60, deadline=None)
def test_c20_positions_count_up_by_one_and_restart_only_at_a_row_or_document(lengths):
    batch = next(packed(documents(*lengths, 40), seq_len=16, isolate_documents=True))
    for positions, owners in zip(batch.positions.tolist(), batch.documents.tolist(), strict=True):
        expected = [0]
        for before, now in pairwise(owners):
            expected.append(expected[-1] + 1 if before == now else 0)
        assert positions == expected


def test_isolated_documents_cost_what_they_cost_alone():
    """The model's loss of a packed row is the sum of its documents' own losses."""
    torch.manual_seed(0)
    model = Qwen3(FLAVORS["debug"])
    initialise(model.initialisation(), seed=0)
    pieces = [TOKENIZER.encode_document(text) for text in documents(5, 9, 2)]
    batch = pack([*pieces, [END]], 1, 19, isolate_documents=True)
    with torch.no_grad():
        together = model(batch.tokens, batch.positions, batch.documents, batch.labels)
        alone = sum(model(torch.tensor([p[:-1]]), labels_BT=torch.tensor([p[1:]])) for p in pieces)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_empty_documents_are_passed_over():
    assert flat(take(packed(["", *documents(3), "", "", "9 9 9 9 9 9"]), 1)) == [1, 2, 3, END, 9, 9, 9, 9]


def test_a15_useful_tokens_are_told_from_all_tokens():
    labels = torch.tensor([[1, 2, 3, IGNORE_INDEX], [4, IGNORE_INDEX, 5, 6]])
    valid = int((labels != IGNORE_INDEX).sum())
    batch = Batch(labels.clamp(0), labels, num_valid_tokens=valid, num_valid_tokens_of_all_ranks=valid)
    assert (batch.num_tokens, batch.num_valid_tokens) == (8, 6)
    assert batch.num_valid_tokens / batch.num_tokens == 0.75


def test_a12_valid_tokens_add_up_over_micro_batches():
    """Half the labels are masked: every document is one word and its end token."""
    batches = packed(["7"] * 100, isolate_documents=True)
    micro_batches = take(batches, 8)
    assert sum(batch.num_tokens for batch in micro_batches) == batches.tokens_seen == 64
    assert sum(batch.num_valid_tokens for batch in micro_batches) == batches.valid_tokens_seen == 32
    assert batches.documents_seen == 32


def test_moving_a_batch_keeps_the_hosts_count(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batch = next(packed(documents(50), isolate_documents=True))
    moved = batch.to(torch.device("meta"))
    assert {t.device.type for t in (moved.tokens, moved.labels, moved.positions, moved.documents)} == {"meta"}
    assert moved.num_valid_tokens == 8 and pinned == []
    assert same(batch.to(torch.device("cpu"), pin_memory=True), batch) and len(pinned) == 4
    plain = next(packed(documents(50))).to(torch.device("meta"))
    assert plain.positions is plain.documents is None


def test_tokens_and_labels_do_not_share_memory():
    batch = next(packed(documents(50)))
    before = batch.tokens.clone()
    batch.labels.fill_(IGNORE_INDEX)
    assert torch.equal(batch.tokens, before)


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_c16_the_next_epoch_goes_on_and_is_counted():
    """5 batches of data, 12 steps: 2.4 passes."""
    batches = packed(documents(39))
    assert len(take(batches, 12)) == 12
    assert batches.epoch == 2 and batches.describe()["epochs"] == 3
    assert batches.tokens_seen == 96 and batches.documents_seen == 2


def test_c6_each_epoch_has_its_own_order_over_the_same_set():
    batches = packed(documents(*[7] * 10), shuffle=True)
    epochs = [flat(take(batches, 10)) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert batches.describe()["order"] == {"shuffle": True, "seed": 0, "epoch": 3}, "the order is recorded"


def test_the_seed_alone_decides_the_order():
    texts = documents(*[7] * 10)
    one, again, other = (flat(take(packed(texts, shuffle=True, seed=seed), 5)) for seed in (1, 1, 2))
    assert one == again != other


def test_held_out_documents_are_never_trained_on():
    texts = documents(*[5] * 20)
    held_out = {int(word) for text in texts[3::4] for word in text.split()}
    batches = packed(texts, held_out_every=4, shuffle=True)
    seen = set(flat(take(batches, 40)))
    assert batches.epoch >= 3
    assert seen - {END} == {int(word) for text in texts for word in text.split()} - held_out


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_rows_in_a_step(world_size, isolate):
    """So a step does not depend on how many ranks share it, and neither does a place in the data."""
    texts = documents(*[7] * 9)
    alone = packed(texts, local_batch_size=8, shuffle=True, isolate_documents=isolate)
    options = {"local_batch_size": 8 // world_size, "shuffle": True, "isolate_documents": isolate, "world_size": world_size}
    ranks = [packed(texts, rank=rank, **options) for rank in range(world_size)]
    for _ in range(7):
        whole, parts = next(alone), [next(rank) for rank in ranks]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
        assert {part.num_valid_tokens_of_all_ranks for part in parts} == {whole.num_valid_tokens}
        assert sum(part.num_valid_tokens for part in parts) == whole.num_valid_tokens
    assert all(rank.state_dict() == alone.state_dict() for rank in ranks)


def test_a_place_is_reached_again_with_another_number_of_ranks():
    texts = documents(*[7] * 9)
    pair = [packed(texts, rank=rank, world_size=2, isolate_documents=True) for rank in range(2)]
    before = [take(rank, 3) for rank in pair]
    alone = resumed(pair[1].state_dict(), texts, local_batch_size=4, isolate_documents=True)
    expected = packed(texts, local_batch_size=4, isolate_documents=True)
    assert all(len(batches) == 3 for batches in before) and take(expected, 3)
    assert torch.equal(next(alone).tokens, next(expected).tokens)


def test_e19_all_ranks_change_the_epoch_in_the_same_step():
    """56 tokens an epoch, which no number of steps divides: nobody waits at the epoch change, nobody stops."""
    ranks = [packed(documents(*[7] * 7), rank=rank, world_size=2) for rank in range(2)]
    for _ in range(9):
        assert [next(rank).tokens.shape for rank in ranks] == [(2, 4)] * 2
    assert [rank.epoch for rank in ranks] == [2, 2]


def held_out(texts, num_batches, **options):
    return HeldOutBatches(packed(texts, held_out_every=2, **options), num_batches)


def test_c14_ranks_agree_on_the_number_of_validation_batches():
    """Held out are 9 batches' worth in documents that no split by document divides evenly: 4 for each of 2 ranks."""
    texts = documents(7, 50, 7, 3, 7, 18)
    ranks = [held_out(texts, 4, rank=rank, world_size=2) for rank in range(2)]
    rounds = [list(rank) for rank in ranks]
    assert [len(batches) for batches in rounds] == [4, 4]
    tokens = [flat(batches[n : n + 1]) for n in range(4) for batches in rounds]
    tape = [t for text in texts[1::2] for t in TOKENIZER.encode_document(text)]
    assert [token for batch in tokens for token in batch] == tape[:64], "the ranks take turns"
    for rank in range(2):
        with pytest.raises(DataError, match=r"got 5, allowed: at most 4, .* 2 x 2 x 4 = 16 tokens .* hold 74"):
            held_out(texts, 5, rank=rank, world_size=2)


# --- validation -------------------------------------------------------------------------------------------------------


def test_c15_a_round_reads_exactly_its_batches():
    train = packed(documents(*[7] * 40), held_out_every=2)
    validation = HeldOutBatches(train, num_batches=2)
    read = list(train.source.reads)
    assert read == [1, 3, 5], "17 tokens are in the first three held-out documents"
    rounds = []
    for _ in range(3):
        validation.reset()
        rounds.append([next(validation) for _ in range(2)])
        with pytest.raises(StopIteration):
            next(validation)
    assert sum(map(len, rounds)) == 6 and train.source.reads == read
    assert all(same(a, b) for later in rounds[1:] for a, b in zip(rounds[0], later, strict=True))


def test_validation_documents_are_isolated_as_training_is():
    (batch,) = held_out(documents(1, 5, 1, 9), 1, isolate_documents=True)
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [6, END, 8, 9]]
    assert batch.labels.tolist() == [[3, 4, 5, 6], [END, IGNORE_INDEX, 9, 10]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_held_out_data_of_exactly_the_batches_is_one_token_short():
    with pytest.raises(
        DataError, match=r"got 2, allowed: at most 1, .* = 8 tokens over all ranks, the last one 1 more, .* hold 16;"
    ):
        held_out(documents(1, 7, 1, 7), 2)
    assert len(held_out(documents(1, 7, 1, 8), 2).batches) == 2


@pytest.mark.parametrize("texts", [["1", "2"], ["1"], ["1", ""]])
def test_too_little_held_out_data_is_refused(texts):
    with pytest.raises(
        DataError, match=r"validation\.num_batches: got 8, allowed: at most 0, .* = 8 tokens .* hold [02]; lower"
    ):
        held_out(texts, 8)


# --- too little data --------------------------------------------------------------------------------------------------


def test_a_sequence_longer_than_the_data_is_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"seq_len is beyond the data: .* 2 x 64 \+ 1 = 129 tokens, .* hold 24"):
        next(packed(documents(*[7] * 3), seq_len=64))


def test_one_batch_is_the_least_that_trains():
    with pytest.raises(DataError, match=r"= 9 tokens, .* hold 8"):
        next(packed(documents(7)))
    assert len(take(packed(documents(8)), 5)) == 5


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"rank": 1, "world_size": 2}])
def test_data_that_gives_no_token_ends_at_once(options):
    with pytest.raises(DataError, match="hold 0"):
        next(packed(["", "", ""], **options))


def test_a_fault_of_the_data_does_not_look_like_its_end():
    """A generator that raised is finished; training on would stop as if the data, which have no end, had ended."""
    batches = packed(documents(5))
    for _ in range(2):
        with pytest.raises(DataError, match="hold 6"):
            next(batches)


def test_after_a_passing_fault_the_batches_go_on_where_they_were(monkeypatch):
    texts = documents(*[5] * 20)
    batches = packed(texts)
    found = take(batches, 2)
    with monkeypatch.context() as patch, pytest.raises(DataError, match="away"):
        patch.setattr(Listed, "read", lambda source, index: (_ for _ in ()).throw(DataError("the disk is away")))
        next(batches)
    found += take(batches, 7)
    assert flat(found) == flat(take(packed(texts), 9))


def test_too_little_data_for_all_ranks_is_refused():
    with pytest.raises(DataError, match=r"takes 3 x 2 x 4 \+ 1 = 25 tokens, the training documents hold 21"):
        next(packed(documents(20), rank=1, world_size=3))


# --- resuming ---------------------------------------------------------------------------------------------------------


def resumed(state, *arguments, **options):
    batches = packed(*arguments, **options)
    batches.load_state_dict(json.loads(json.dumps(state)))
    return batches


def test_c2_any_number_of_resumes_gives_the_same_batches():
    """Stopped at 5, 10 and 15, against 20 straight."""
    texts = documents(*[3, 11, 1, 30, 6])
    options = {"shuffle": True, "isolate_documents": True}
    straight, stopped = packed(texts, **options), packed(texts, **options)
    expected, found = take(straight, 20), take(stopped, 5)
    for _ in range(3):
        stopped = resumed(stopped.state_dict(), texts, **options)
        found += take(stopped, 5)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    assert stopped.state_dict() == straight.state_dict() and stopped.epoch >= 2


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    stops=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    seq_len=st.integers(1, 7),
    shuffle=st.booleans(),
    isolate=st.booleans(),
    rank=st.integers(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_c2_stopping_anywhere_changes_nothing(lengths, stops, seq_len, shuffle, isolate, rank):
    texts = documents(20, *lengths, 20)
    texts = [text for text in texts for _ in range(2)]  # each rank has enough, whatever the order
    options = {"seq_len": seq_len, "shuffle": shuffle, "isolate_documents": isolate, "rank": rank, "world_size": 2}
    try:
        expected = take(packed(texts, **options), sum(stops))
    except DataError:  # an unlucky order left this rank without a batch
        return
    found, batches = [], packed(texts, **options)
    for stop in stops:
        found += take(batches, stop)
        batches = resumed(batches.state_dict(), texts, **options)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_c8_the_epoch_is_restored_before_anything_is_read():
    batches = packed(documents(39))
    take(batches, 7)
    again = resumed(batches.state_dict(), documents(39))
    assert again.epoch == batches.epoch == 1
    assert (again.tokens_seen, again.documents_seen) == (56, 1)


def test_resuming_reads_only_from_the_place_on():
    texts = documents(*[7] * 20)
    batches = packed(texts)
    take(batches, 10)
    again = resumed(batches.state_dict(), texts)
    next(again)
    assert min(again.source.reads) == 10


def test_the_state_is_small_and_may_continue_in_another_shape():
    texts = documents(*[90] * 20)
    batches = packed(texts, seq_len=100)
    before = flat(take(batches, 3))
    state = batches.state_dict()
    assert len(json.dumps(state)) < 500
    after = flat(take(resumed(state, texts, seq_len=7, local_batch_size=3), 2))
    assert before + after == flat(take(packed(texts, seq_len=1, local_batch_size=1), 642))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "run.seed was 0, got 1"),
        ({"shuffle": True}, "data.shuffle was False, got True"),
        ({"held_out_every": 3}, "data.held_out_every was 10000, got 3"),
    ],
)
def test_a_state_of_another_order_is_refused(change, named):
    texts = documents(20, 20)
    with pytest.raises(DataError, match=named):
        resumed(packed(texts).state_dict(), texts, **change)


def test_a_state_of_other_data_is_refused():
    with pytest.raises(DataError, match=r"data\.fingerprint was"):
        resumed(packed(documents(20)).state_dict(), documents(21))


# --- DataLoader workers -----------------------------------------------------------------------------------------------


class Wrapped(torch.utils.data.IterableDataset):
    """As a user would hand the batches to a DataLoader."""

    def __init__(self, batches, count):
        self.batches, self.count = batches, count

    def __iter__(self):
        return (next(self.batches).tokens for _ in range(self.count))


def test_c5_workers_are_refused_because_they_would_repeat_documents():
    loader = torch.utils.data.DataLoader(Wrapped(packed(documents(99)), 12), batch_size=None, num_workers=2)
    workers = iter(loader)
    with pytest.raises(DataError, match="num_workers=0"):
        next(workers)
    workers._shutdown_workers()  # left to the garbage collector, they are waited for in vain, 5 s each


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-built iterator, torch 2.13
@pytest.mark.parametrize("num_workers", [0, 2])
def test_c5_a_loader_straight_over_the_batches_is_refused_in_one_line(num_workers):
    loader = torch.utils.data.DataLoader(packed(documents(99)), batch_size=None, num_workers=num_workers)
    with pytest.raises(TypeError, match="cannot be read by a DataLoader: workers would repeat") as caught:
        next(iter(loader))
    assert "\n" not in str(caught.value)
    del caught, loader
    gc.collect()  # the half-built iterator's complaint belongs to this test


def test_c5_without_workers_each_id_comes_once():
    loader = torch.utils.data.DataLoader(Wrapped(packed(documents(99)), 12), batch_size=None, num_workers=0)
    ids = torch.cat([tokens.flatten() for tokens in loader]).tolist()
    assert ids == list(range(1, 97))


# --- from a recipe ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path):
    number_words().save(str(tmp_path / "tokenizer.json"))
    for number, text in enumerate(documents(*[50] * 20)):
        (tmp_path / f"{number:02}.txt").write_text(text, encoding="utf-8")
    data = Data(source="files", path=str(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"), held_out_every=5)
    return Recipe(name="test", data=data, training=Training(seq_len=8, local_batch_size=3))


def test_build_data_follows_the_recipe(recipe):
    train, validation = build_data(recipe, 4000)
    assert validation is None
    assert next(train).tokens.shape == (3, 8)
    described = train.describe()
    assert (described["source"], described["documents"], described["tokens_seen"]) == ("files", 20, 24)
    assert described["tokenizer"]["vocab_size"] == 4000
    assert json.loads(json.dumps(described)) == described


def test_build_data_holds_out_what_it_validates_on(recipe):
    recipe = Recipe(**{**vars(recipe), "validation": Validation(every_steps=1, num_batches=3)})
    _, validation = build_data(recipe, 4000)
    assert validation is not None and len(list(validation)) == 3
    assert validation.batches[0].tokens[0, 0] == 201, "the fifth document comes first"


def test_c17_build_data_refuses_ids_beyond_the_model(recipe):
    with pytest.raises(DataError, match="got 256, allowed: at least 4000"):
        build_data(recipe, 256)


def test_embedded_text_needs_neither_datasets_nor_the_network(recipe):
    """`datasets` takes longer to import than the rest of the data together."""
    code = (
        "import sys; from recipes.base import *; from training.data import build_data\n"
        f"next(build_data(Recipe(name='x', data=Data(tokenizer={recipe.data.tokenizer!r})), 4000)[0])\n"
        "assert not {'datasets', 'huggingface_hub', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, timeout=120)
