"""The compile cache of TorchInductor, which compiles for the CPU and for CUDA.

Two caches are consulted for each compiled region: AOTAutograd's (one entry for forward and backward together) and the FX
graph cache (one entry for each of the two, which holds the generated code). Seen on torch 2.13.0: a warm run consults the FX
graph cache even when AOTAutograd's has hit, so its counters alone say how many graphs were fetched and how many compiled.
Only with torch._functorch.config.bundled_autograd_cache is the generated code in AOTAutograd's entry; then the FX graph
cache is not consulted at all and AOTAutograd's counters say it.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
from pathlib import Path

from backends.base import CompileCache

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory() -> Path:
    """Where TorchInductor keeps its cache. Unlike torch's own function, this neither creates it nor costs an import.

    Source: torch/_inductor/runtime/cache_dir_utils.py. A test compares the two.
    """
    if directory := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.abspath(directory))
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def hits_and_misses() -> tuple[int, int]:
    """Graphs that this process has fetched from the cache, and graphs that it has compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:  # nothing has been compiled in this process: a measured zero
        return 0, 0
    graphs, autograd = dynamo.counters["inductor"], dynamo.counters["aot_autograd"]
    hits = graphs["fxgraph_cache_hit"]
    misses = graphs["fxgraph_cache_miss"] + graphs["fxgraph_cache_bypass"]
    if hits or misses:
        return hits, misses
    return autograd["autograd_cache_hit"], autograd["autograd_cache_miss"]


def compile_cache() -> CompileCache:
    """TorchInductor's persistent compile cache now."""
    hits, misses = hits_and_misses()
    return CompileCache.at(cache_directory(), hits=hits, misses=misses)
