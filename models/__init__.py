"""The networks, by family and flavor. Torch-free: `load_family` imports the network itself, and torch with it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from recipes.base import Model, RecipeError

if TYPE_CHECKING:
    from models.qwen3.config import Qwen3Config
    from models.qwen3.model import Qwen3

FAMILIES = {"qwen3": "Qwen3"}
"""Folder under models/ : name of the network in its model.py. Each folder has the same drawers: config.py, model.py,
parallelize.py and state_dict_adapter.py, and shows its size table as FLAVORS."""


class ModelError(RecipeError):
    """A network that cannot be built or filled with weights as asked."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What the loop needs of one family."""

    Model: type[Qwen3]
    """Builds the network from its configuration."""
    parallelize: Callable[..., None]
    """Applies a layout in place: tensor parallel, activation checkpointing, compilation, sharding."""
    adapter: Any
    """The module that translates to and from Hugging Face's names and config.json."""


def model_config(model: Model, seq_len: int = 1, tensor_parallel_degree: int = 1) -> Qwen3Config:
    """Return the dimensions that a recipe asks for: its flavor's, with its own overrides on top.

    Args:
        seq_len: longest sequence that the network will see, in tokens.
        tensor_parallel_degree: ranks that are to share each matrix.

    Raises:
        ModelError: if there is no such family or flavor, naming the nearest, the sequence outgrows the rotary table, or the
            network cannot be split that way.
    """
    _require_known("model.family", model.family, FAMILIES)
    family = importlib.import_module(f"models.{model.family}")
    _require_known("model.flavor", model.flavor, family.FLAVORS)
    flavor = family.FLAVORS[model.flavor]
    overrides = {name: getattr(model, name) for name in ("num_layers", "ffn_dim", "vocab_size")}
    config = dataclasses.replace(
        family.tiny(flavor) if model.tiny else flavor, **{k: v for k, v in overrides.items() if v is not None}
    )
    if problems := family.check_layout(config, tensor_parallel_degree):
        raise ModelError("; ".join(problems))
    if seq_len > config.max_seq_len:
        raise ModelError(
            f"training.seq_len: got {seq_len:,}, allowed: at most {config.max_seq_len:,} with model.flavor {model.flavor}; "
            "shorten the sequences or choose another flavor"
        )
    return config


def load_family(name: str) -> Family:
    """Import a family's network.

    Raises:
        ModelError: if there is no such family; names the nearest.
    """
    _require_known("model.family", name, FAMILIES)
    folder = f"models.{name}"
    return Family(
        Model=getattr(importlib.import_module(f"{folder}.model"), FAMILIES[name]),
        parallelize=importlib.import_module(f"{folder}.parallelize").parallelize,
        adapter=importlib.import_module(f"{folder}.state_dict_adapter"),
    )


def _require_known(field: str, got: str, allowed: Iterable[str]) -> None:
    by_lower = {name.lower(): name for name in allowed}
    if got in by_lower.values():
        return
    nearest = [by_lower[match] for match in difflib.get_close_matches(got.lower(), by_lower, cutoff=0.5)]
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ModelError(f"{field}: got {got!r}, allowed: {', '.join(by_lower.values())}{hint}")
