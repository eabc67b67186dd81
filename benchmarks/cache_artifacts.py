"""What is left to do on a wiped machine: after torch's own cache artifacts, and after the whole folder.

    python -m benchmarks.cache_artifacts

One run fills a cache and saves `torch.compiler.save_cache_artifacts()`. Then the same run starts with: an empty
folder and the artifacts loaded, a copy of the folder elsewhere, the folder itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ["debug", "--run.mode", "compile", "--training.steps", "5", "--optimizer.warmup_steps", "2"]
WORK += ["--validation.every_steps", "0", "--run.no_tensorboard"]
PROGRAM = """
import sys, pathlib, torch, train
act, file, *arguments = sys.argv[1:]
if act == 'load':
    import torch._dynamo, torch._inductor.compile_fx  # registers the kinds of artifacts
    info = torch.compiler.load_cache_artifacts(pathlib.Path(file).read_bytes())
    print('loaded', {kind: len(keys) for kind, keys in info.artifacts.items()})
code = train.main(arguments)
if act == 'save':
    pathlib.Path(file).write_bytes(torch.compiler.save_cache_artifacts()[0])
sys.exit(code)
"""


def run(act: str, cache: Path, folder: Path) -> None:
    """Train in a process of its own and print what it found in its cache."""
    before = set(folder.glob("runs/*"))
    command = [sys.executable, "-c", PROGRAM, act, str(folder / "artifacts"), *WORK, "--run.output_dir", str(folder / "runs")]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    (new,) = set(folder.glob("runs/*")) - before
    record = json.loads((new / "record.json").read_text())
    used, first = record["compile"]["cache"], record["timing"]["first_step_seconds"]
    loaded = next((line for line in done.stdout.splitlines() if line.startswith("loaded")), "")
    kernels = len(list(cache.rglob("*.so")))
    print(f"  hits {used['hits']}, misses {used['misses']}, first step {first:.2f} s, kernels in the folder {kernels} {loaded}")


def main() -> int:
    """Run all of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled = folder / "filled"
        print("empty folder (fills it)", flush=True)
        run("save", filled, folder)
        for round_number in (1, 2):
            size = (folder / "artifacts").stat().st_size
            print(f"round {round_number}: empty folder, torch's artifacts loaded ({size:,} bytes)", flush=True)
            run("load", folder / f"loaded-{round_number}", folder)
            print(f"round {round_number}: copy of the folder elsewhere", flush=True)
            shutil.copytree(filled, folder / f"copy-{round_number}", ignore=shutil.ignore_patterns("*.gch", "*.lock"))
            run("none", folder / f"copy-{round_number}", folder)
            print(f"round {round_number}: the folder itself", flush=True)
            run("none", filled, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
