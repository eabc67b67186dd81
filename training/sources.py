"""Where documents come from: the standard library's own sources, local files, or a hub data set.

A source numbers its documents in a natural order that never changes. Every n-th is held out by that number, before any
shuffling, so that no epoch, seed or rank can train on it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import random
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from recipes.base import Data, RecipeError

SHUFFLE_BUFFER = 1024
"""Documents of a hub stream that wait to be drawn from."""
BUILDERS = {".txt": None, ".jsonl": "json", ".parquet": "parquet"}
"""Extension of a local file: the builder of `datasets` that reads it. None: the whole file is one document."""
HASHED_BYTES = 1 << 27
"""How much of local files a fingerprint reads, in all: an equal share of each, from its beginning."""
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
"""Folders below the standard library that are no source text worth learning, or not part of it."""


class DataError(RecipeError):
    """The data cannot be used as asked. One line: what, got, allowed, and the fix."""


def open_source(data: Data) -> DocumentSource:
    """Open the documents that a recipe names, or raise DataError. Text is decoded when it is asked for, not here."""
    if data.source == "stdlib":
        return standard_library(data)
    assert data.path is not None, "a rule of the recipe"
    return HubStream(data, data.path) if data.source == "hub" else local_files(data, data.path)


class DocumentSource(ABC):
    """Numbered documents, some of them held out."""

    description: str
    """One phrase for people."""
    fingerprint: str
    """Short hash that two runs share if they read the same data."""
    num_documents: int | None = None
    size_bytes: int | None = None

    def __init__(self, data: Data):
        self.data = data

    @abstractmethod
    def training_documents(self, seed: int, epoch: int, start: int = 0) -> Iterator[str]:
        """Yield one pass over the texts that are not held out, in the order of this seed and epoch, from the start-th on."""

    @abstractmethod
    def held_out_documents(self) -> Iterator[str]:
        """Yield the held-out texts, in the same order every time."""

    def describe(self) -> dict[str, Any]:
        """What was read, for the record. Unknown is None."""
        return {
            "source": self.data.source,
            "path": self.data.path,
            "description": self.description,
            "documents": self.num_documents,
            "bytes": self.size_bytes,
            "fingerprint": self.fingerprint,
        }


class IndexedSource(DocumentSource):
    """Documents that can be read in any order, so that an epoch is a permutation of all of them."""

    num_documents: int  # pyright: ignore[reportIncompatibleVariableOverride] - always known here, and set only once

    @abstractmethod
    def read(self, index: int) -> str:
        """Return one document's text."""

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the numbers of the training documents in the order of one epoch."""
        kept = np.delete(np.arange(self.num_documents), np.s_[self.data.held_out_every - 1 :: self.data.held_out_every])
        return np.random.default_rng((seed, epoch)).permutation(kept) if self.data.shuffle else kept

    def training_documents(self, seed: int, epoch: int, start: int = 0) -> Iterator[str]:
        return (self.read(int(index)) for index in self.order(seed, epoch)[start:])

    def held_out_documents(self) -> Iterator[str]:
        return map(self.read, range(self.data.held_out_every - 1, self.num_documents, self.data.held_out_every))


class TextFiles(IndexedSource):
    """One document per file: `names` are relative to `folder`, and `open_text` knows the encoding."""

    def __init__(self, data: Data, folder: Path, names: list[str], open_text: Callable[[Path], TextIO], description: str):
        super().__init__(data)
        self.folder, self.names, self.open_text, self.num_documents = folder, names, open_text, len(names)
        self.size_bytes, self.fingerprint = _measure(folder, names)
        self.description = f"{len(names):,} {description}, {self.size_bytes / 1e6:,.1f} MB"

    def read(self, index: int) -> str:
        path = self.folder / self.names[index]
        try:
            with self.open_text(path) as file:
                return file.read()
        except (OSError, UnicodeDecodeError, SyntaxError) as error:  # SyntaxError: an encoding that Python does not know
            raise DataError(f"cannot read {path}: {one_line(error)}; allowed: text in UTF-8; fix or remove it") from error


class TableFiles(IndexedSource):
    """One document per row of JSONL or Parquet, memory-mapped from the cache that `datasets` keeps."""

    def __init__(self, data: Data, folder: Path, names: list[str], builder: str):
        super().__init__(data)
        self.size_bytes, files = _measure(folder, names)
        self.fingerprint = _fingerprint(files, data.text_field)
        paths = [str(folder / name) for name in names]
        try:
            # `path` is a pattern to datasets, so a name's own [, ? and * are escaped.
            rows = _load_dataset(builder, data_files=[glob.escape(path) for path in paths], split="train")
        except Exception as error:  # datasets wraps whatever its readers raise
            reason = (_bad_json_line(paths) if builder == "json" else None) or one_line(error.__cause__ or error)
            raise DataError(f"data.path: cannot read {data.path} as {builder}: {reason}; repair it or leave it out") from error
        _require_text_column(data, rows.column_names, getattr(rows.features.get(data.text_field), "dtype", "mixed values"))
        self.rows = rows.select_columns([data.text_field])
        self.num_documents = len(rows)
        self.description = f"{len(rows):,} rows of {len(names):,} {builder} files, {self.size_bytes / 1e6:,.1f} MB"

    def read(self, index: int) -> str:
        return _text_of(self.rows[index], self.data)


class HubStream(DocumentSource):
    """A hub data set, read in one direction and never stored.

    A place in an epoch is reached again by reading from the epoch's start: the shuffle buffer is drawn anew, so resuming is
    exact. `datasets` does not shuffle: it would reorder files and so the numbers, and train on what another epoch holds out.
    """

    def __init__(self, data: Data, name: str):
        super().__init__(data)
        try:
            import huggingface_hub

            # Asked for first: it pins what is read to one commit, and fails at once where loading would retry for long.
            self.revision = huggingface_hub.dataset_info(name).sha
            self.rows = _load_dataset(name, name=data.subset, split=data.split, revision=self.revision, streaming=True)
        except Exception as error:  # network, hub, access and data-set errors have no base in common
            asked = " ".join(part for part in (name, data.subset, data.split) if part)
            fix = "check the names and the network, or use --data.source files"
            raise DataError(f"data.path: cannot open the hub data set {asked}: {one_line(error)}; {fix}") from error
        size = (self.rows.info.splits or {}).get(data.split)
        self.num_documents, self.size_bytes = (size.num_examples, size.num_bytes) if size else (None, None)
        self.fingerprint = _fingerprint(name, data.subset, data.split, data.text_field, self.revision)
        self.description = f"{name} at {(self.revision or 'unknown revision')[:12]}, streamed"

    def training_documents(self, seed: int, epoch: int, start: int = 0) -> Iterator[str]:
        texts = self._texts(held_out=False)
        return islice(_shuffled(texts, seed, epoch) if self.data.shuffle else texts, start, None)

    def held_out_documents(self) -> Iterator[str]:
        return self._texts(held_out=True)

    def _texts(self, held_out: bool) -> Iterator[str]:
        for number, row in enumerate(self.rows, 1):
            if (number % self.data.held_out_every == 0) is held_out:
                yield _text_of(row, self.data)


def standard_library(data: Data) -> TextFiles:
    """Return the Python sources of the interpreter's own standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    names = _walk(root, [".py"], NOT_LIBRARY)
    if not names:
        raise DataError(f"data.source: got stdlib, but there are no .py files in {root}; use --data.source files")
    return TextFiles(data, root, names, tokenize.open, f"files of the standard library of Python {platform.python_version()}")


def local_files(data: Data, path: str) -> IndexedSource:
    """Return the documents of a file, of all readable kinds of files below a folder, or of a glob's matches."""
    place, allowed = os.path.expanduser(path), ", ".join(BUILDERS)  # os.path: answers no where Path raises
    if is_folder := os.path.isdir(place):
        folder, names = Path(place), _walk(Path(place), BUILDERS)
    elif os.path.exists(place):
        folder, names = Path(place).parent, [Path(place).name]
    else:
        matches = {match for match in glob.glob(place, recursive=True) if os.path.isfile(match)}  # two ** give one file twice
        folder = Path(os.path.commonpath([os.path.dirname(match) for match in matches]) if matches else "")
        names = sorted(Path(match).relative_to(folder).as_posix() for match in matches)
    if not names:
        what = "nothing matches" if is_folder or glob.has_magic(path) else "no such file"
        raise DataError(f"data.path: {what}: got {path!r}; allowed: a file, a folder or a glob of {allowed} files")
    kinds = sorted({Path(name).suffix or "extensionless" for name in names})
    if len(kinds) > 1 or kinds[0] not in BUILDERS:
        raise DataError(f"data.path: got {' and '.join(kinds)} files in {path!r}, allowed: one of {allowed}; narrow by a glob")
    if builder := BUILDERS[kinds[0]]:
        return TableFiles(data, folder, names, builder)
    return TextFiles(data, folder, names, lambda file: file.open(encoding="utf-8"), "text files")


def _walk(root: Path, suffixes: Collection[str], skip: Collection[str] = ()) -> list[str]:
    """Return the files below a folder with one of the suffixes as sorted relative names, without hidden ones."""
    names = []
    for folder, folders, files in os.walk(root, onerror=_refuse):  # strings, not Path: it runs before the first step
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = [os.path.join(folder, name) for name in files if name.endswith(tuple(suffixes)) and not name.startswith(".")]
        names += [path.removeprefix(f"{root}{os.sep}") for path in paths if os.path.isfile(path)]
    return sorted(names)


def _measure(folder: Path, names: list[str]) -> tuple[int, str]:
    """Return the total size of files and the fingerprint of their names, sizes and content, as far as that is read."""
    sizes, content, share = [], hashlib.sha256(), HASHED_BYTES // len(names)
    try:
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                content.update(file.read(share))
                sizes.append(file.seek(0, os.SEEK_END))
    except OSError as error:
        _refuse(error)
    if not any(sizes):
        raise DataError(f"data.path: got only empty files in {folder}; name files that hold text")
    return sum(sizes), _fingerprint(names, sizes, content.hexdigest())


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"data.path: cannot read: {one_line(error)}; make it readable or leave it out") from error


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _shuffled(texts: Iterator[str], seed: int, epoch: int) -> Iterator[str]:
    """Draw each next text from a buffer of the following SHUFFLE_BUFFER."""
    rng, buffer = random.Random(f"{seed}, {epoch}"), list(islice(texts, SHUFFLE_BUFFER))
    for text in texts:
        drawn = rng.randrange(SHUFFLE_BUFFER)
        yield buffer[drawn]
        buffer[drawn] = text
    rng.shuffle(buffer)
    yield from buffer


def _load_dataset(*args: Any, **options: Any) -> Any:
    """Call `datasets.load_dataset` without its progress bars and log lines. Importing it takes a second or more."""
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return datasets.load_dataset(*args, **options)
    finally:
        datasets.logging.set_verbosity(verbosity)


def _require_text_column(data: Data, columns: Iterable[str], kind: str) -> None:
    if data.text_field not in columns:
        raise DataError(f"data.text_field: got {data.text_field!r}, allowed: {', '.join(columns)}; set --data.text_field")
    if kind not in ("str", "string", "large_string", "string_view"):
        raise DataError(f"data.text_field: {data.text_field!r} holds {kind}, allowed: text; set --data.text_field")


def _text_of(row: dict[str, Any], data: Data) -> str:
    """Return a row's text; a null is an empty document."""
    text = row.get(data.text_field, "")
    _require_text_column(data, row, "str" if text is None else type(text).__name__)
    return text or ""


def _bad_json_line(paths: list[str]) -> str | None:
    """Return where the first line that is not JSON is; `datasets` only says in which block."""
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip() and not isinstance(json.loads(line), dict):
                        return f"line {number} of {path} is not a JSON object"
                except ValueError as error:
                    return f"line {number} of {path} is not JSON ({error})"
    return None


def one_line(error: BaseException) -> str:
    """Return what an exception says, as one line of bearable length: its first line alone is often the least of it."""
    return " ".join((str(error) or type(error).__name__).split())[:300]
