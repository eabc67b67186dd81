"""Qwen3, dense. Importing this shows the sizes and costs no torch; the network is in `models.qwen3.model`."""

from models.qwen3.config import FLAVORS, Qwen3Config, check_layout, tiny

__all__ = ["FLAVORS", "Qwen3Config", "check_layout", "tiny"]
