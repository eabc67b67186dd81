"""Text to token ids: the default tokenizer and its cache, the user's own, and the tokens that end documents."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from recipes.base import Data
from training import tokenizer as module
from training.sources import DataError, standard_library
from training.tokenizer import END_OF_TEXT, check_vocabulary, default_tokenizer, load_tokenizer, train_bpe


def words(*special, vocabulary=("alpha", "beta", "gamma")):
    """A tokenizer of whole words; `special` tokens follow the words."""
    ids = {word: number for number, word in enumerate(("[UNK]", *vocabulary))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def save(folder, tokenizer, **files):
    """Write tokenizer.json and further JSON files, as a Hugging Face checkpoint has them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(path, notify=print):
    return load_tokenizer(Data(tokenizer=str(path)), notify)


# --- the default tokenizer --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The default tokenizer, trained once into a cache of its own; what it said; its cache."""
    cache, notes = tmp_path_factory.mktemp("cache"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return default_tokenizer(notes.append), notes, cache


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A default tokenizer that takes a tenth of a second to train, with an empty cache."""
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", 200_000)
    monkeypatch.setattr(module, "DEFAULT_VOCAB_SIZE", 400)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "firststep"


def test_default_tokenizer_has_exactly_4096_entries(trained):
    tokenizer, notes, _ = trained
    assert tokenizer.vocab_size == 4096
    assert tokenizer.end_id == 0 and tokenizer.begin_id is None
    assert len(notes) == 1 and notes[0].startswith("training the default tokenizer on 4 MB")


def test_default_tokenizer_is_cached(trained, monkeypatch):
    tokenizer, _, cache = trained
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(module, "train_bpe", None)
    notes = []
    assert load_tokenizer(Data(), notes.append).fingerprint == tokenizer.fingerprint
    assert notes == []
    assert len(list((cache / "firststep").iterdir())) == 1, "no partial file stays behind"


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_comes_back(trained, text):
    tokenizer, _, _ = trained
    assert tokenizer.decode(tokenizer.encode_document(text)) == text + END_OF_TEXT


def test_the_same_text_trains_the_same_tokenizer():
    texts = ["def f(x):\n    return x\n" * 20, "import os, sys\n" * 30]
    assert train_bpe(iter(texts), 300).to_str() == train_bpe(iter(texts), 300).to_str()


def test_training_starts_no_threads_and_leaves_the_environment(quick, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    seen = []
    texts = (seen.append(os.environ["TOKENIZERS_PARALLELISM"]) or text for text in ["some text"])
    train_bpe(texts, 300)
    assert seen == ["false"] and "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "not json", b"\xff\xfe"])
def test_a_damaged_cache_is_replaced_and_said(quick, content):
    first = default_tokenizer(lambda line: None)
    (cached,) = quick.iterdir()
    cached.write_bytes(content if isinstance(content, bytes) else content.encode())
    notes = []
    assert default_tokenizer(notes.append).fingerprint == first.fingerprint
    assert "is damaged" in notes[0] and "training" in notes[1]
    assert default_tokenizer(notes.append) and len(notes) == 2, "the cache is whole again"


def test_a_cached_tokenizer_of_another_size_is_replaced(quick):
    default_tokenizer(lambda line: None)
    (cached,) = quick.iterdir()
    cached.write_text(words(END_OF_TEXT).to_str(), encoding="utf-8")
    assert default_tokenizer(lambda line: None).vocab_size == 400


def test_a_cache_that_cannot_be_written_is_said(quick):
    quick.parent.write_text("a file where the folder should be", encoding="utf-8")
    notes = []
    assert default_tokenizer(notes.append).vocab_size == 400
    assert notes[1].startswith("cannot keep the tokenizer in ") and "XDG_CACHE_HOME" in notes[1]


def test_without_a_home_folder_the_cache_is_temporary(quick, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", str)  # what it does where nobody knows a home
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert module._cache_path(standard_library(Data())).parent == tmp_path / "temporary" / "firststep"


def test_another_library_has_another_cache_file(quick):
    library = standard_library(Data())
    first = module._cache_path(library)
    library.fingerprint = "another"
    assert module._cache_path(library) != first
    assert first.parent == quick


# --- the user's tokenizer: which tokens begin and end a document ------------------------------------------------------


def test_c18_one_token_for_both_roles_is_kept_in_both(tmp_path):
    roles = {"bos_token": "<|x|>", "eos_token": "<|x|>"}
    tokenizer = load(save(tmp_path, words("<|x|>"), tokenizer_config=roles))
    assert tokenizer.encode_document("alpha beta") == [4, 1, 2, 4]
    assert tokenizer.encode_document("") == [4, 4]


def test_c18_the_end_token_is_kept_without_a_begin_token(tmp_path):
    tokenizer = load(save(tmp_path, words("<|x|>"), tokenizer_config={"eos_token": "<|x|>", "bos_token": None}))
    assert tokenizer.encode_document("alpha beta") == [1, 2, 4]


def test_c18_the_tokenizers_own_template_adds_nothing_twice(tmp_path):
    from tokenizers.processors import TemplateProcessing

    wrapped = words("<s>", "</s>")
    wrapped.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 4), ("</s>", 5)])
    roles = {"bos_token": "<s>", "eos_token": "</s>"}
    assert load(save(tmp_path, wrapped, tokenizer_config=roles)).encode_document("alpha") == [4, 1, 5]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}, "bos_token": {"content": "<s>"}}}, [4, 1, 5]),
        ({"special_tokens_map": {"eos_token": "</s>", "bos_token": "<s>"}}, [4, 1, 5]),
        ({"tokenizer_config": {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False}}, [1, 5]),
        ({}, [1, 5]),  # by convention
    ],
)
def test_where_the_roles_are_found(tmp_path, files, expected):
    assert load(save(tmp_path, words("<s>", "</s>"), **files)).encode_document("alpha") == expected


def test_a_file_of_any_name_is_a_tokenizer(tmp_path):
    path = tmp_path / "mine.json"
    words("</s>").save(str(path))
    assert load(path).end == "</s>"


def test_no_end_token_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"eos_token in tokenizer_config\.json and special_tokens_map\.json, .*<\|endoftext\|>"):
        load(save(tmp_path, words("<pad>")))


def test_an_end_token_without_an_id(tmp_path):
    with pytest.raises(DataError, match=r"names '<gone>' as a special token but has no id"):
        load(save(tmp_path, words("</s>"), tokenizer_config={"eos_token": "<gone>"}))


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    cutting = words("</s>")
    cutting.enable_truncation(2)
    cutting.enable_padding(length=8)
    assert load(save(tmp_path, cutting)).encode_document("alpha beta gamma alpha") == [1, 2, 3, 1, 4]


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "absent" / "tokenizer.json")
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load(tmp_path)
    with pytest.raises(DataError, match="is not JSON"):
        (save(tmp_path, words("</s>")) / "tokenizer_config.json").write_text("{", encoding="utf-8")
        load(tmp_path)


@pytest.mark.parametrize("path", ["~nobody-has-this-name/tokenizer.json", "/" + "a" * 300])
def test_a_name_that_cannot_be_looked_up_is_missing_too(path):
    with pytest.raises(DataError, match="no such file"):
        load(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "holds a list, allowed: a JSON object"),
        ("</s>", "holds a str, allowed: a JSON object"),
        ({"eos_token": 5}, "eos_token is 5, allowed: text"),
        ({"bos_token": ["<s>"]}, r"bos_token is \['<s>'\], allowed: text"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_one_line(tmp_path, config, message):
    with pytest.raises(DataError, match=message):
        load(save(tmp_path, words("</s>"), tokenizer_config=config))


def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path):
    (save(tmp_path, words("</s>")) / "tokenizer_config.json").mkdir()  # stands in for a locked file, which root may read
    with pytest.raises(DataError, match=r"cannot read: .*tokenizer_config\.json'; make it readable"):
        load(tmp_path)


def test_a_hub_id_is_downloaded_as_a_folder(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    save(tmp_path, words("</s>"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.append(name) or str(tmp_path))
    assert load("someone/model").name == "someone/model"
    assert asked == ["someone/model"]


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(name, **options):
        raise OSError("no route\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DataError) as caught:
        load("someone/model")
    assert "the hub says: no route and a long story; check the name" in str(caught.value) and "\n" not in str(caught.value)


# --- saving and sizes -------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_is_the_same(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "kept"}
    (tmp_path / "from").mkdir()
    first = load(save(tmp_path / "from", words("<s>", "</s>"), tokenizer_config=config))
    first.save(tmp_path / "to")
    assert load(tmp_path / "to").fingerprint == first.fingerprint
    assert json.loads((tmp_path / "to" / "tokenizer_config.json").read_text())["chat_template"] == "kept"


def test_transformers_opens_what_was_saved(trained, tmp_path):
    from transformers import AutoTokenizer

    tokenizer, _, _ = trained
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.end_id
    assert [*theirs("def f(x):\n\treturn x")["input_ids"], theirs.eos_token_id] == tokenizer.encode_document(
        "def f(x):\n\treturn x"
    )


def test_the_vocabulary_size_counts_holes_and_added_tokens(tmp_path):
    sparse = Tokenizer(models.WordLevel({"[UNK]": 0, "alpha": 7}, unk_token="[UNK]"))
    sparse.add_special_tokens(["</s>"])
    tokenizer = load(save(tmp_path, sparse))
    assert tokenizer.vocab_size == max(7, tokenizer.end_id) + 1


def test_fingerprint_follows_the_vocabulary_and_the_roles(tmp_path):
    prints = set()
    for number, (tokenizer, roles) in enumerate(
        [
            (words("<s>", "</s>"), {"eos_token": "</s>"}),
            (words("<s>", "</s>"), {"eos_token": "</s>", "bos_token": "<s>"}),
            (words("<s>", "</s>", vocabulary=("alpha", "delta")), {"eos_token": "</s>"}),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        prints.add(load(save(folder, tokenizer, tokenizer_config=roles)).fingerprint)
    assert len(prints) == 3


def sized(tmp_path, size):
    return load(save(tmp_path, words("</s>", vocabulary=[f"w{number}" for number in range(size - 2)])))


def test_c17_ids_beyond_the_embedding_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(DataError, match=r"got 256, allowed: at least 300, .* reach 299; set --model\.vocab_size 300"):
        check_vocabulary(sized(tmp_path, 300), 256)


def test_c19_a_larger_embedding_is_allowed(tmp_path):
    check_vocabulary(sized(tmp_path, 250), 256)
    check_vocabulary(sized(tmp_path, 256), 256)
