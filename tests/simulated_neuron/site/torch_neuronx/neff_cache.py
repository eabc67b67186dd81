"""The persistent cache of compiled graphs, and the compiler behind it: a file for each, a lock for each, a wait for each.

Settings, from the environment:
FIRSTSTEP_SIMULATED_COMPILE_SECONDS        how long a graph takes to compile; 0: no compiler process is started
FIRSTSTEP_SIMULATED_COMPILE_SECONDS_RANK   "1:6": on rank 1 every graph takes 6 s more
FIRSTSTEP_SIMULATED_EAGER_COMPILE_SECONDS  how long the first use of an eager operator takes
FIRSTSTEP_SIMULATED_COMPILER_EXIT          "1:70": on rank 1 the compiler ends with exit code 70
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import time
from pathlib import Path

from torch_neuronx import metrics

COMPILER = Path(__file__).with_name("neuronx-cc")
VERSION = "2.28.7631.0"
_loaded: set[str] = set()


class NEFFCompilationError(RuntimeError):
    """The compiler failed; the message has its command, exit code and log."""


def key_of(text: str) -> str:
    """Return the cache key of a graph: of what is compiled, and of everything that changes what comes out."""
    flags = [os.environ.get(name, "") for name in ("NEURON_CC_FLAGS", "NEURON_COMPILER_OPT_LEVEL", "NEURON_LOGICAL_NC_CONFIG")]
    return hashlib.blake2b("\0".join([VERSION, *flags, text]).encode(), digest_size=16).hexdigest()


def fetch(text: str, seconds: float, *, is_graph: bool = False) -> str:
    """Make sure that a graph is compiled, and return its key.

    Args:
        text: what is compiled. The file holds it, so that two of them can be compared.
        seconds: what compiling it takes.
    """
    key = key_of(text)
    if key in _loaded:
        metrics.count("InMemoryHits")
        return key
    metrics.count("InMemoryMisses")
    file = Path(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache")) / key[:2] / key[2:4] / f"{key}.neff"
    locks = Path(os.environ.get("TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR", "/tmp/local_cache"))
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks one compiles, the others then find the file
        found = file.is_file() and file.stat().st_size > 0  # an empty file is a damaged entry, and compiled again
        metrics.count("PersistentHits" if found else "PersistentMisses")
        if not found:
            _compile(text, file, seconds, is_graph)
            metrics.count("TotalCompilations")
    _loaded.add(key)
    return key


def _compile(text: str, file: Path, seconds: float, is_graph: bool) -> None:
    rank, code = os.environ.get("RANK", "0"), "0"
    if is_graph:
        seconds += float(_for_rank("FIRSTSTEP_SIMULATED_COMPILE_SECONDS_RANK", rank) or 0)
        code = _for_rank("FIRSTSTEP_SIMULATED_COMPILER_EXIT", rank) or "0"
    if seconds > 0 or code != "0":
        log = file.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(COMPILER), "compile", str(seconds), code]
        with log.open("w") as output:
            returned = subprocess.run(command, stdout=output, stderr=output).returncode
        if returned:
            raise NEFFCompilationError(f"neuronx-cc exited with {returned}: {' '.join(command)}; its log is {log}")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def fetch_graph(text: str) -> tuple[str, float]:
    """Make sure that a compiled graph is there; return its key and how long that took in seconds."""
    began = time.perf_counter()
    key = fetch(text, float(os.environ.get("FIRSTSTEP_SIMULATED_COMPILE_SECONDS", "0")), is_graph=True)
    return key, time.perf_counter() - began


def fetch_operator(name: str, arguments: str) -> None:
    """The same for one eager operator with arguments of these types and shapes."""
    fetch(f"eager {name}{arguments}", float(os.environ.get("FIRSTSTEP_SIMULATED_EAGER_COMPILE_SECONDS", "0")))


def _for_rank(name: str, rank: str) -> str | None:
    """Return what a setting of the form rank:value says for this rank."""
    which, _, value = os.environ.get(name, "").partition(":")
    return value if value and which == rank else None
