"""From text to token ids: a tokenizer.json of the user's, or a small byte-level BPE trained once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.base import Data
from training.sources import DataError, TextFiles, one_line, standard_library

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
SAMPLE_CHARACTERS = 4_000_000
"""How much of the standard library the default tokenizer is trained on."""
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")
"""Tokens that end a document by convention, looked for where no configuration names one."""
HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

Notify = Callable[[str], object]


class TextTokenizer:
    """A tokenizer and the tokens that begin and end a document.

    Args:
        end: the token that ends each document.
        begin: the token that begins each document. It may be the same one. None: documents have no such token.
        config: tokenizer_config.json to save beside the tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, name: str, end: str, begin: str | None = None, config: dict[str, Any] | None = None
    ):
        # A tokenizer.json may ask to cut or pad every text: right for one prompt, silent loss in training data.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name, self.end, self.begin, self.config = name, end, begin, config or {}
        self._tokenizer = tokenizer
        self.end_id = self._id_of(end)
        self.begin_id = None if begin is None else self._id_of(begin)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """The highest id plus one: ids may have holes, and added tokens count."""
        identity = (tokenizer.to_str(), self.begin_id, self.end_id)
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def _id_of(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise DataError(f"data.tokenizer: {self.name} names {token!r} as a special token but has no id for it")
        return token_id

    def encode_document(self, text: str) -> list[int]:
        """Return a document's ids: the begin token if there is one, the text, the end token.

        A special token that is spelt out in the text becomes that token, as in transformers.
        """
        # One text at a time, on this thread: encode_batch starts threads, which do not survive a fork.
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids.append(self.end_id)
        return ids if self.begin_id is None else [self.begin_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as transformers and `load_tokenizer` read them."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, "eos_token": self.end}
        if self.begin is not None:
            config["bos_token"] = self.begin
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        """Which tokenizer this is, for the record."""
        return {
            "name": self.name,
            "vocab_size": self.vocab_size,
            "end_token": self.end,
            "begin_token": self.begin,
            "fingerprint": self.fingerprint,
        }


def load_tokenizer(data: Data, notify: Notify = print) -> TextTokenizer:
    """Load the tokenizer that a recipe names, or the default one.

    Args:
        notify: gets one line where the user waits for something, or should know of it.

    Raises:
        DataError: if there is no such tokenizer, it cannot be read, or no token ends its documents.
    """
    if data.tokenizer is None:
        return default_tokenizer(notify)
    place = Path(os.path.expanduser(data.tokenizer))
    if os.path.isdir(place):  # os.path, as in training.sources: it answers no where Path raises
        return _from_folder(place, data.tokenizer)
    if os.path.isfile(place):
        return _from_folder(place.parent, data.tokenizer, place.name)
    if place.suffix == ".json" or data.tokenizer.startswith((".", "/", "~")) or data.tokenizer.count("/") > 1:
        raise DataError(
            f"data.tokenizer: got {data.tokenizer!r}: no such file; allowed: a tokenizer.json, its folder or a hub id"
        )
    return _from_folder(_download(data.tokenizer), data.tokenizer)


def check_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids the model's embedding does not hold. A larger embedding is fine: rows stay unused.

    Raises:
        DataError: with both sizes.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"model.vocab_size: got {vocab_size}, allowed: at least {tokenizer.vocab_size}, as the ids of tokenizer "
            f"{tokenizer.name} reach {tokenizer.vocab_size - 1}; set --model.vocab_size {tokenizer.vocab_size} or choose a "
            "smaller --data.tokenizer"
        )


# --- the user's tokenizer ---------------------------------------------------------------------------------------------


def _from_folder(folder: Path, name: str, file_name: str = "tokenizer.json") -> TextTokenizer:
    path = folder / file_name
    if not os.path.isfile(path):
        raise DataError(f"data.tokenizer: got {name!r}, which has no tokenizer.json; save it with transformers' fast tokenizer")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"data.tokenizer: {path} is not a tokenizer.json: {one_line(error)}") from error
    config, roles = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "special_tokens_map.json")
    end = _token(config, "eos_token") or _token(roles, "eos_token")
    begin = _token(config, "bos_token") or _token(roles, "bos_token")
    if end is None:
        end = next((token for token in END_TOKENS if tokenizer.token_to_id(token) is not None), None)
    if end is None:
        raise DataError(
            f"data.tokenizer: {name!r} has no token that ends a document; looked for eos_token in tokenizer_config.json and "
            f"special_tokens_map.json, then for {', '.join(END_TOKENS)}; name it as eos_token in tokenizer_config.json"
        )
    return TextTokenizer(tokenizer, name, end, None if config.get("add_bos_token") is False else begin, config)


def _token(roles: dict[str, Any], role: str) -> str | None:
    """Return the token in a role, which is written either as text or as an object with its content."""
    token = roles.get(role)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise DataError(f"data.tokenizer: {role} is {token!r}, allowed: text, or an object with its content; correct its file")
    return token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"data.tokenizer: cannot read: {one_line(error)}; make it readable") from error
    except ValueError as error:
        raise DataError(f"data.tokenizer: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"data.tokenizer: {path} holds a {type(content).__name__}, allowed: a JSON object; save it anew")
    return content


def _download(name: str) -> Path:
    """Return the local folder with a hub repository's tokenizer files."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # network, hub and name errors have no base in common
        raise DataError(
            f"data.tokenizer: got {name!r}, which is no file or folder here, and the hub says: {one_line(error)}; check the "
            "name and the network, or give a tokenizer.json"
        ) from error


# --- the default tokenizer --------------------------------------------------------------------------------------------


def default_tokenizer(notify: Notify = print) -> TextTokenizer:
    """Return the byte-level BPE of the standard library: from the cache, or trained now and kept there."""
    library = standard_library(Data())
    path = _cache_path(library)
    tokenizer = _cached(path, notify)
    if tokenizer is None:
        notify(
            f"training the default tokenizer on {SAMPLE_CHARACTERS / 1e6:.0f} MB of the standard library (once, a few seconds)"
        )
        tokenizer = train_bpe(_sample(library), DEFAULT_VOCAB_SIZE)
        _keep(tokenizer, path, notify)
    return TextTokenizer(tokenizer, f"stdlib-bpe-{DEFAULT_VOCAB_SIZE}", END_OF_TEXT)


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with END_OF_TEXT as id 0. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    with _one_thread():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sample(library: TextFiles) -> Iterator[str]:
    """Yield SAMPLE_CHARACTERS of text from files spread evenly over the library: in the order of their names' hashes."""
    room = SAMPLE_CHARACTERS
    for index in sorted(range(len(library.names)), key=lambda i: hashlib.sha256(library.names[i].encode()).digest()):
        text = library.read(index)[:room]
        room -= len(text)
        yield text
        if not room:
            return


def _cache_path(library: TextFiles) -> Path:
    """Return where the tokenizer of this library, trained by this recipe, is kept."""
    recipe = (DEFAULT_VOCAB_SIZE, SAMPLE_CHARACTERS, library.fingerprint, tokenizers.__version__)
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if cache.parts[0] == "~":  # nobody knows a home folder: a container with a user of its own
        cache = Path(tempfile.gettempdir())
    return cache / "firststep" / f"tokenizer-{platform.python_version()}-{digest}.json"


def _cached(path: Path, notify: Notify) -> Tokenizer | None:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        if tokenizer.get_vocab_size() == DEFAULT_VOCAB_SIZE and tokenizer.token_to_id(END_OF_TEXT) is not None:
            return tokenizer
        reason = "not what was written there"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # tokenizers raises bare Exception
        reason = str(error)
    notify(f"the cached tokenizer {path} is damaged ({reason}) and will be replaced")
    return None


def _keep(tokenizer: Tokenizer, path: Path, notify: Notify) -> None:
    """Write the cache file in one piece, so that a process that starts at the same time never reads half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(tokenizer.to_str(), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        notify(f"cannot keep the tokenizer in {path.parent} ({error}); the next run trains it again; set XDG_CACHE_HOME")
        with suppress(OSError):
            partial.unlink()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep tokenizers from starting threads, unless the user set its variable. Training takes as long without them."""
    name = "TOKENIZERS_PARALLELISM"
    mine = name not in os.environ
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if mine:
            del os.environ[name]
