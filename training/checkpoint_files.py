"""torch.distributed.checkpoint on any file system of fsspec: a checksum for every file, and the marker written last."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoint_store import CheckpointStore, Manifest

METADATA = ".metadata"


@dataclass(frozen=True)
class CheckedResult(WriteResult):
    """What was written of one tensor, with what its whole file came to."""

    file_bytes: int = 0
    sha256: str = ""


class CheckedWriter(FileSystemWriter):
    """Writes one checkpoint into a store. Its coordinator marks it complete when every rank has written its files.

    Args:
        manifest: of this checkpoint; its files are filled in.
    """

    def __init__(self, store: CheckpointStore, manifest: Manifest):
        super().__init__(store.folder(manifest.step), sync_files=store.is_local)
        self.store, self.manifest = store, manifest
        self.fs = _Files(store)
        self.path = store.folder(manifest.step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take away what an earlier attempt left in the folder: the coordinator, before any rank writes."""
        with suppress(FileNotFoundError):  # an object store has no folder before it has something in it
            for path in self.store.files.ls(self.path, detail=False):
                self.store.files.rm_file(path)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        checked: list[WriteResult] = []
        for result in super().write_data(plan, planner).wait():
            file_bytes, sha256 = self.fs.written[result.storage_data.relative_path]
            checked.append(CheckedResult(result.index, result.size_in_bytes, result.storage_data, file_bytes, sha256))
        done: Future[list[WriteResult]] = Future()
        done.set_result(checked)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files = {METADATA: self.fs.written[f"{METADATA}.tmp"]}
        for result in (result for of_rank in results for result in of_rank):
            assert isinstance(result, CheckedResult)
            files[result.storage_data.relative_path] = (result.file_bytes, result.sha256)
        listed = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(files.items())}
        self.store.mark_complete(replace(self.manifest, files=listed))


class CheckedReader(FileSystemReader):
    """Reads one checkpoint of a store."""

    def __init__(self, store: CheckpointStore, step: int):
        super().__init__(store.folder(step))
        self.fs = _Files(store)
        self.path = store.folder(step)


class _Files(FileSystemBase):
    """What torch.distributed.checkpoint asks of a file system."""

    def __init__(self, store: CheckpointStore):
        self.files = store.files
        self.written: dict[str, tuple[int, str]] = {}
        """Name of each file that was written whole, with its size and SHA-256."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        path = os.fspath(path)
        if "w" not in mode:
            with self.files.open(path, mode) as stream:
                yield stream
            return
        checked = None
        try:
            with self.files.open(path, mode) as stream:
                checked = _Checked(stream)
                yield checked
        except Exception as error:
            with suppress(OSError):
                self.rm_file(path)  # what a full disk cut off gives its room back
            # torch's serialisation makes another error of it, and a write does not say where.
            error = (checked and checked.error) or error
            if isinstance(error, OSError) and error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, path) from None
            raise
        self.written[posixpath.basename(path)] = checked.size, checked.digest.hexdigest()

    def concat_path(self, path: str | os.PathLike, suffix: str) -> str:
        return posixpath.join(os.fspath(path), suffix)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        self.files.mv(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: str | os.PathLike) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike) -> None:
        self.files.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def exists(self, path: str | os.PathLike) -> bool:
        return self.files.exists(os.fspath(path))

    def rm_file(self, path: str | os.PathLike) -> None:
        self.files.rm_file(os.fspath(path))


class _Checked(io.RawIOBase):
    """Passes on what is written, and adds it up."""

    def __init__(self, stream: Any):
        self.stream, self.size, self.digest = stream, 0, hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self.stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.stream.closed:
            self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def close(self) -> None:
        """torch closes before it leaves the block: what is not yet on disk must fail there, where the error has a name."""
        self.stream.close()
