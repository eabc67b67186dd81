"""A stand-in for the device `neuron` and for torch-neuronx, built once and used by subprocesses only.

A process can have one device of this kind, and with it `neuron` is the accelerator of everything in the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SITE = HERE / "site"
EXTENSIONS = ("neuron_device", "neuron_collectives")


def require_built() -> Path:
    """Return the folder of the built extensions; build them if this is the first time for this torch and these sources.

    Skips the test, with the reason, where nothing can be built.
    """
    sources = sorted((HERE / "csrc").iterdir())
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / "firststep-simulated-neuron"
    folder = cache / f"torch-{torch.__version__}-python-{sys.version_info[0]}.{sys.version_info[1]}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # two test processes may come here at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((folder / f"{name}.so").is_file() for name in EXTENSIONS):
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    for tool in ("c++", "ninja"):
        # A virtual environment's tools lie beside its Python, which need not be on PATH.
        if shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}") is None:
            pytest.skip(f"the stand-in for `neuron` cannot be built here: no {tool}")
    # In a process of its own: building ends with loading, and this process is to have no such device.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    for name in EXTENSIONS:
        source = HERE / "csrc" / f"{name.removeprefix('neuron_')}.cpp"
        work = folder / f"{name}.build"
        work.mkdir(exist_ok=True)
        program = (
            "import sys\nfrom torch.utils.cpp_extension import load\n"
            "load(sys.argv[1], [sys.argv[2]], extra_cflags=['-O1', '-g0'], build_directory=sys.argv[3])"
        )
        command = [sys.executable, "-c", program, name, str(source), str(work)]
        built = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout + built.stderr
        shutil.copy(work / f"{name}.so", folder / f"{name}.partial")
        (folder / f"{name}.partial").replace(folder / f"{name}.so")


def environment(folder: Path, **settings: str) -> dict[str, str]:
    """Return what a subprocess needs in its environment to have the stand-in.

    Args:
        folder: gets the compile cache and its locks.
        settings: of `torch_neuronx.neff_cache`, by the end of their names in lower case, or variables of Neuron.
    """
    variables = {
        "PYTHONPATH": os.pathsep.join((str(SITE), str(HERE.parent.parent))),
        "FIRSTSTEP_SIMULATED_NEURON": str(require_built()),
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(folder / "neff_cache"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(folder / "local_cache"),
        "OMP_NUM_THREADS": "1",
    }
    for name, value in settings.items():
        variables[name if name.isupper() else f"FIRSTSTEP_SIMULATED_{name.upper()}"] = value
    return variables
