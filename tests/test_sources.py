"""Documents: where they come from, in which order, which of them are held out, and how a fault reads."""

import json
import logging
import os
import tokenize

import pytest

from recipes.base import Data
from training import sources
from training.sources import DataError, open_source

LETTERS = [f"document {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


def files(path, **options):
    return open_source(Data(source="files", path=str(path), **options))


def everything(source, seed=0, epoch=0):
    """All texts of one epoch: the training documents, then those held out."""
    return [*source.training_documents(seed, epoch), *source.held_out_documents()]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A folder to write tables into, with the cache of `datasets` beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tables"
    folder.mkdir()
    return folder


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- the standard library ---------------------------------------------------------------------------------------------


def test_standard_library_is_all_readable_and_holds_no_tests():
    source = sources.standard_library(Data())
    assert source.num_documents == len(source.names) > 300
    assert source.names == sorted(source.names)
    assert "json/decoder.py" in source.names
    assert not [name for name in source.names if sources.NOT_LIBRARY & set(name.split("/"))]
    assert sum(len(source.read(index)) for index in range(len(source.names))) > 5_000_000


def test_standard_library_is_opened_without_reading_it(monkeypatch):
    opened, really_open = [], tokenize.open
    monkeypatch.setattr(tokenize, "open", lambda path: opened.append(path) or really_open(path))
    source = open_source(Data())
    texts = source.training_documents(seed=0, epoch=0)
    assert opened == []
    next(texts)
    assert len(opened) == 1


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no \.py files in .*--data\.source files"):
        open_source(Data())


# --- local files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    for letter, text in zip("abcdefghijklmnopqrstuvwxyz", LETTERS, strict=True):
        (tmp_path / f"{letter}.txt").write_text(text, encoding="utf-8")
    return tmp_path


def test_one_text_file_is_one_document(texts):
    source = files(texts / "a.txt")
    assert (source.num_documents, source.size_bytes) == (1, 10)
    assert everything(source) == ["document a"]


def test_a_folder_is_read_in_depth_and_only_what_can_be_read(texts):
    nested = texts / "test" / "deep"
    nested.mkdir(parents=True)
    (nested / "z.txt").write_text("nested", encoding="utf-8")
    (texts / "README.md").write_text("not data", encoding="utf-8")
    (texts / ".hidden.txt").write_text("not data", encoding="utf-8")
    source = files(texts, shuffle=False, held_out_every=100)
    # A folder that happens to be called test is skipped in the standard library, not in the user's data.
    assert everything(source) == [*LETTERS[:20], "nested", *LETTERS[20:]]


def test_a_glob_keeps_the_natural_order(texts):
    assert everything(files(texts / "[c-e].txt", shuffle=False, held_out_every=100)) == LETTERS[2:5]
    assert everything(files(texts / "**" / "[xy].txt", shuffle=False, held_out_every=100)) == LETTERS[23:25]


def test_a_file_that_a_glob_finds_twice_is_one_document(texts):
    """Two ** reach the same file on two ways: it would be held out under one number and trained on under the other."""
    (texts / "nested").mkdir()
    (texts / "nested" / "z.txt").write_text("nested", encoding="utf-8")
    source = files(texts / "**" / "**" / "z.txt", shuffle=False, held_out_every=2)
    assert everything(source) == ["nested", LETTERS[25]] or everything(source) == [LETTERS[25], "nested"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_row_is_one_document(tables, kind, capfd):
    import datasets

    datasets.enable_progress_bars()
    rows = [{"body": text, "number": number} for number, text in enumerate([*LETTERS, None])]
    path = tables / f"odd [name] *.{kind}"
    if kind == "jsonl":
        write_jsonl(path, rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    capfd.readouterr()
    source = files(tables, text_field="body", shuffle=False, held_out_every=10)
    assert source.num_documents == 27
    assert list(source.held_out_documents()) == [LETTERS[9], LETTERS[19]]
    assert sorted(everything(source)) == sorted([*LETTERS, ""])  # a null is an empty document
    assert capfd.readouterr() == ("", ""), "no progress bars, no log lines"


def test_several_tables_are_one_source(tables):
    write_jsonl(tables / "b.jsonl", [{"text": "third"}])
    write_jsonl(tables / "a.jsonl", [{"text": "first"}, {"text": "second"}])
    assert everything(files(tables, shuffle=False)) == ["first", "second", "third"]


def test_the_fingerprint_follows_the_files_and_not_their_place(tmp_path):
    for folder, text in (("one", "same"), ("two", "same"), ("three", "other text")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text, encoding="utf-8")
    one, two, three = (files(tmp_path / folder).fingerprint for folder in ("one", "two", "three"))
    assert one == two != three


def test_the_fingerprint_sees_an_edit_that_keeps_the_size(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    before = files(tmp_path).fingerprint
    os.utime(tmp_path / "a.txt", (0, 0))
    assert files(tmp_path).fingerprint == before, "a date is not data"
    (tmp_path / "a.txt").write_text("two", encoding="utf-8")
    assert files(tmp_path).fingerprint != before


def test_the_fingerprint_reads_a_bounded_share_of_each_file(texts, monkeypatch):
    monkeypatch.setattr(sources, "HASHED_BYTES", 26 * 4)
    before = files(texts)
    (texts / "m.txt").write_text("docuMENT m", encoding="utf-8")
    assert files(texts).fingerprint == before.fingerprint and before.size_bytes == 260
    (texts / "m.txt").write_text("Document m", encoding="utf-8")
    assert files(texts).fingerprint != before.fingerprint


def test_describe_says_what_was_read(texts):
    described = files(texts).describe()
    assert described == {
        "source": "files",
        "path": str(texts),
        "description": "26 text files, 0.0 MB",
        "documents": 26,
        "bytes": 260,
        "fingerprint": described["fingerprint"],
    }


# --- faults of local files: one clear line each -----------------------------------------------------------------------


def refused(path, **options):
    with pytest.raises(DataError) as caught:
        everything(files(path, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_files(tmp_path):
    assert "no such file: got" in refused(tmp_path / "absent.txt")
    assert "nothing matches: got" in refused(tmp_path / "*.txt")
    assert "nothing matches: got" in refused(tmp_path)
    assert ".txt, .jsonl, .parquet" in refused(tmp_path)


@pytest.mark.parametrize("path", ["", "~nobody-has-this-name/a.txt", "a" * 300, "a\0b"])
def test_a_name_that_cannot_be_looked_up_is_missing_too(path):
    with pytest.raises(DataError, match="no such file: got"):
        open_source(Data(source="files", path=path))


def test_unknown_and_mixed_kinds(tmp_path):
    for name in ("a.csv", "a.txt", "a.jsonl"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    (tmp_path / "README").write_text("x", encoding="utf-8")
    assert "got .csv files" in refused(tmp_path / "a.csv")
    assert "got extensionless files" in refused(tmp_path / "README")
    assert "got .jsonl and .txt files" in refused(tmp_path)


def test_empty_files(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.jsonl").touch()
    assert "only empty files" in refused(tmp_path / "a.txt")
    assert "only empty files" in refused(tmp_path / "a.jsonl")


def test_an_unreadable_file_is_refused_before_training(texts, monkeypatch):
    def locked(path, *arguments):
        if str(path).endswith("q.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *arguments)

    monkeypatch.setattr(sources, "open", locked, raising=False)  # root may read everything
    with pytest.raises(DataError, match=r"cannot read: .*Permission denied: .*q\.txt'; make it readable or leave it out"):
        files(texts)


def test_an_unreadable_folder_is_refused_and_not_passed_over(texts, monkeypatch):
    (texts / "locked").mkdir()
    really_scan = os.scandir

    def scan(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return really_scan(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(DataError, match=r"cannot read: .*Permission denied: .*locked'; make it readable"):
        files(texts)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    assert "latin.txt" in refused(tmp_path) and "UTF-8" in refused(tmp_path)


def test_missing_column_names_the_columns(tables):
    path = write_jsonl(tables / "a.jsonl", [{"body": "x", "title": "y"}])
    assert "data.text_field: got 'text', allowed: body, title" in refused(path)


@pytest.mark.parametrize("value", [7, ["a"], {"a": "b"}])
def test_a_column_that_is_not_text(tables, value):
    path = write_jsonl(tables / "a.jsonl", [{"text": value}])
    assert "allowed: text" in refused(path)


def test_bad_json_names_the_file_and_line(tables, monkeypatch):
    logged = []
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [handler := logging.Handler()])
    handler.emit = logged.append
    path = tables / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": oops}\n', encoding="utf-8")
    assert f"line 3 of {path} is not JSON (" in refused(tables)
    path.write_text('{"text": "fine"}\n["not", "a", "row"]\n', encoding="utf-8")
    assert f"line 2 of {path} is not a JSON object" in refused(tables)
    assert logged == [], "the error says it all"


def test_tables_of_different_columns_are_told_apart(tables):
    write_jsonl(tables / "a.jsonl", [{"text": "x"}])
    write_jsonl(tables / "b.jsonl", [{"text": "y", "title": 1}])
    assert "title" in refused(tables) and "column names don't match" in refused(tables)


def test_a_table_that_is_none(tables):
    (tables / "bad.parquet").write_bytes(b"not a parquet file at all")
    assert "cannot read" in refused(tables)


def test_a_table_without_rows(tables):
    import datasets

    datasets.Dataset.from_dict({"text": []}).to_parquet(str(tables / "a.parquet"))
    assert "no data" in refused(tables)


# --- order and held-out documents -------------------------------------------------------------------------------------


def test_c6_each_epoch_has_its_own_order_over_the_same_set(texts):
    source = files(texts, held_out_every=5)
    epochs = [list(source.training_documents(seed=0, epoch=epoch)) for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[1] == list(files(texts, held_out_every=5).training_documents(seed=0, epoch=1)), "from seed and epoch alone"
    assert epochs[0] != list(source.training_documents(seed=1, epoch=0))


def test_without_shuffling_every_epoch_is_the_natural_order(texts):
    source = files(texts, shuffle=False, held_out_every=5)
    expected = [text for number, text in enumerate(LETTERS, 1) if number % 5]
    assert list(source.training_documents(0, 0)) == list(source.training_documents(7, 3)) == expected


def test_every_nth_document_is_held_out_from_every_epoch(texts):
    source = files(texts, held_out_every=5)
    held_out = LETTERS[4::5]
    assert list(source.held_out_documents()) == held_out
    for epoch in range(4):
        assert not set(held_out) & set(source.training_documents(0, epoch))


def test_a_place_in_an_epoch_can_be_reached_directly(texts):
    source = files(texts)
    whole = list(source.training_documents(0, 2))
    assert list(source.training_documents(0, 2, start=7)) == whole[7:]


# --- hub streams ------------------------------------------------------------------------------------------------------


class Hub:
    """Stands in for the network: serves rows as a stream of the data set."""

    def __init__(self, monkeypatch, rows):
        import datasets
        import huggingface_hub

        self.rows, self.calls = rows, []
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr(huggingface_hub, "dataset_info", self.info)

    def info(self, name):
        self.name, self.sha = name, "0123456789abcdef"
        return self

    def load(self, path, **options):
        import datasets

        self.calls.append((path, options))
        return datasets.IterableDataset.from_generator(lambda: iter(self.rows))


@pytest.fixture
def hub(monkeypatch):
    return Hub(monkeypatch, [{"text": text} for text in LETTERS])


def stream(**options):
    return open_source(Data(source="hub", path="someone/corpus", **options))


def test_a_hub_stream_is_pinned_to_one_commit(hub):
    source = stream(subset="small", split="validation")
    assert hub.calls == [("someone/corpus", {"name": "small", "split": "validation", "revision": hub.sha, "streaming": True})]
    described = source.describe()
    assert (described["documents"], described["bytes"]) == (None, None), "unknown is None"
    assert "0123456789ab" in described["description"]
    assert described["fingerprint"] != stream(subset="large", split="validation").fingerprint


def test_c6_a_stream_is_shuffled_anew_each_epoch_and_never_trains_on_what_it_holds_out(hub, monkeypatch):
    monkeypatch.setattr(sources, "SHUFFLE_BUFFER", 4)
    source = stream(held_out_every=5)
    epochs = [list(source.training_documents(seed=0, epoch=epoch)) for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for epoch in epochs:
        assert sorted(epoch) == [text for number, text in enumerate(LETTERS, 1) if number % 5]
    assert list(source.held_out_documents()) == LETTERS[4::5]
    assert list(stream(shuffle=False).training_documents(0, 1)) == LETTERS


def test_c2_a_place_in_a_shuffled_stream_is_reached_exactly(hub, monkeypatch):
    monkeypatch.setattr(sources, "SHUFFLE_BUFFER", 4)
    source = stream()
    whole = list(source.training_documents(0, 1))
    for start in (0, 1, 7, 25, 26):
        assert list(source.training_documents(0, 1, start=start)) == whole[start:]


def test_a_stream_without_the_column_names_its_columns(hub):
    with pytest.raises(DataError, match=r"got 'body', allowed: text"):
        next(stream(text_field="body").training_documents(0, 0))


@pytest.mark.parametrize("stage", ["info", "load"])
def test_a_hub_that_does_not_answer_is_one_line(hub, monkeypatch, stage):
    import datasets
    import huggingface_hub

    def fail(*args, **options):
        raise ConnectionError("Couldn't reach 'someone/corpus' on the Hub\nwith a long story")

    target, name = (huggingface_hub, "dataset_info") if stage == "info" else (datasets, "load_dataset")
    monkeypatch.setattr(target, name, fail)
    with pytest.raises(DataError) as caught:
        stream()
    assert str(caught.value) == (
        "data.path: cannot open the hub data set someone/corpus train: Couldn't reach 'someone/corpus' on the Hub with a long "
        "story; check the names and the network, or use --data.source files"
    )
