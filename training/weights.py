"""Weights on disk as Hugging Face lays them out: a folder of safetensors, config.json and a card.

A folder is mapped when read, not copied, and it appears whole or not at all when written.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.base import RecipeError
from training.initialise import local_part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


class WeightsError(RecipeError):
    """A folder of weights that cannot be read or written."""


class Adapter(Protocol):
    """What a model family knows about Hugging Face: `models/<family>/state_dict_adapter.py`."""

    def to_hf(self, state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]: ...

    def from_hf(self, state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]: ...

    def hf_config(self, config: Any, dtype: str) -> dict[str, Any]: ...

    def check_config(self, found: Mapping[str, Any], config: Any) -> None: ...


# --- models ---------------------------------------------------------------------------------------------------------------


def weights_folder(place: str, turn: AbstractContextManager[Any] | None = None) -> Path:
    """Return the local folder of weights: the one that is named, or that of a hub repository, fetched if need be.

    Args:
        turn: entered before the hub is asked: ranks of one host should not all fetch the same files.

    Raises:
        WeightsError: if it is neither, or the hub cannot be reached.
    """
    if Path(place).is_dir() or place.count("/") != 1 or place.startswith((".", "/", "~")):
        return Path(place)
    import huggingface_hub

    try:
        with turn or nullcontext():
            return Path(huggingface_hub.snapshot_download(place, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # network, hub and name errors have no base in common
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise WeightsError(
            f"model.initial_weights: got {place!r}, which is no folder here, and the hub says: {said}; check the name and the "
            "network, or fetch it first: hf download NAME --local-dir FOLDER"
        ) from None


def load_weights(model: nn.Module, adapter: Adapter, folder: str | Path) -> None:
    """Fill a materialised model from a Hugging Face folder, casting to each parameter's own dtype and device.

    Each rank copies its own shards out of the mapped files.

    Raises:
        RecipeError: if the folder is incomplete or describes another model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; it should hold config.json and {SINGLE_FILE} or {INDEX_FILE}")
    adapter.check_config(_read_json(folder / "config.json"), model.config)
    state = adapter.from_hf(read_safetensors(folder), model.config)
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{name}: materialise the model before loading it"
        if state[name].shape != parameter.shape:
            raise WeightsError(f"{name}: got shape {[*state[name].shape]} in {folder}, allowed: {[*parameter.shape]}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, part = local_part(parameter)
            local.copy_(state[name][part])


def export_weights(
    model: nn.Module,
    adapter: Adapter,
    folder: str | Path,
    save_tokenizer: Callable[[Path], object] | None = None,
    *,
    step: int,
    start: str | None = None,
    dtype: torch.dtype = torch.float32,
    facts: Mapping[str, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writes: bool = True,
) -> None:
    """Write a folder that transformers opens: weights, config.json, tokenizer, and a card that says how they came about.

    Args:
        save_tokenizer: called with the folder to write into.
        step: optimizer steps that these weights have seen.
        start: the weights that training started from. None: random initialisation.
        dtype: of every floating-point tensor in the file, whatever the model holds.
        facts: further rows of the card, also stored in the weight files' metadata.
        writes: False on the ranks that only send their shards. All ranks must call this; one tensor at a time is whole.
    """
    state = adapter.to_hf(dict(model.named_parameters()), model.config)
    if not writes:
        for tensor in state.values():
            _whole(tensor)
        return
    facts = {"step": str(step), "note": provenance(step, start), **(facts or {})}
    dtype_name = str(dtype).removeprefix("torch.")
    described = adapter.hf_config(model.config, dtype_name)
    title = f"{', '.join(described['architectures'])}, {sum(tensor.numel() for tensor in state.values()):,} parameters"
    with _new_folder(Path(folder)) as partial:
        _write_shards(partial, state, facts, dtype, max_shard_bytes)
        _write_json(partial / "config.json", described)
        (partial / "README.md").write_text(_card(title, facts | {"dtype": dtype_name}), encoding="utf-8")
        if save_tokenizer is not None:
            save_tokenizer(partial)


def provenance(step: int, start: str | None = None) -> str:
    """Say in a few words what weights have been through, so that untrained ones are never taken for a broken export."""
    if step == 0:
        return "random init, step 0" if start is None else f"{start} unchanged, step 0"
    return f"trained from {start or 'random init'}, step {step}"


def _card(title: str, facts: Mapping[str, str]) -> str:
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    return (
        f"---\nlibrary_name: transformers\n---\n\n# {title}\n\n{facts['note']}\n\n| | |\n|---|---|\n{rows}\n"
        "    from transformers import AutoModelForCausalLM\n"
        '    model = AutoModelForCausalLM.from_pretrained("this folder")\n'
    )


# --- files ----------------------------------------------------------------------------------------------------------------


def read_safetensors(folder: str | Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by its name there. Pages are read from disk when they are first touched.

    A single `model.safetensors` wins over an index, as in transformers.

    Raises:
        WeightsError: if a file is missing or unreadable, or lacks a tensor that the index promises.
    """
    folder = Path(folder)
    state: dict[str, Tensor] = {}
    for path, promised in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                lacking = sorted(set(promised) - set(names))
                if lacking:
                    raise WeightsError(f"{path}: lacks {_few(lacking)}, which {INDEX_FILE} promises; copy the folder again")
                state |= {name: file.get_tensor(name) for name in promised or names}
        except FileNotFoundError:
            raise WeightsError(f"{path}: missing, although {INDEX_FILE} lists it; copy the folder again") from None
        except SafetensorError as error:
            raise WeightsError(f"{path}: not a complete safetensors file ({error}); copy it again") from None
    return state


def write_safetensors(
    folder: str | Path,
    state: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors into a new folder: one file, or shards with an index above the limit. Host memory holds one shard.

    Args:
        dtype: of every floating-point tensor in the file. None: each as it is.

    Raises:
        WeightsError: if the folder already holds something, or a tensor has no data.
    """
    with _new_folder(Path(folder)) as partial:
        _write_shards(partial, state, metadata or {}, dtype, max_shard_bytes)


def _shards(folder: Path) -> list[tuple[Path, list[str]]]:
    """Return each weight file with the tensors that the index promises in it (none promised: take them all)."""
    if (folder / SINGLE_FILE).exists():
        return [(folder / SINGLE_FILE, [])]
    if not (folder / INDEX_FILE).exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*"))[:5]) or "nothing"
        raise WeightsError(f"{folder}: got {found}, allowed: {SINGLE_FILE} or {INDEX_FILE}; other formats are not read")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not weight_map:
        raise WeightsError(f"{folder / INDEX_FILE}: got no weight_map, which says where each tensor is; copy it again")
    promised: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        promised.setdefault(file, []).append(name)
    return [(folder / file, names) for file, names in sorted(promised.items())]


def _write_shards(
    folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str], dtype: torch.dtype | None, max_shard_bytes: int
) -> None:
    sizes = {name: tensor.numel() * _file_dtype(tensor, dtype).itemsize for name, tensor in state.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_on_host(state, names, dtype), folder / file, metadata={**metadata, "format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only their owner can read
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _on_host(state: Mapping[str, Tensor], names: Iterable[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return contiguous host copies that share no storage: a name in the file always has its own data."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in names:
        if state[name].is_meta:
            raise WeightsError(f"{name}: on the meta device, so there is no data to write; materialise the model first")
        tensor = _whole(state[name]).to("cpu", _file_dtype(state[name], dtype)).contiguous()
        if tensor.untyped_storage().data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be spread over the ranks; all of them must ask for it at the same time."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Torch warns that a tensor split twice is gathered in two collectives. Here that is meant.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return tensor.full_tensor().detach()


def _file_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden sibling that takes the folder's name if the body succeeds, and vanishes if it fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder}: already there, allowed: a new or an empty folder; remove it or choose another")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path}: missing; a checkpoint folder holds config.json beside its weights") from None
    except ValueError as error:
        raise WeightsError(f"{path}: not JSON ({error}); copy it again") from None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
