"""The layout's promises, read from the syntax trees: who imports whom, which names stay behind which door, file sizes."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("recipes", "models", "backends", "training", "preflight", "ledger", "bench", "port", "interop", "scripts")

MAY_IMPORT = {
    # folder: project modules it may import besides its own
    "recipes": (),
    "models": ("recipes.base",),
    "backends": (),
    "training": ("recipes.base", "backends.base", "backends.peak_flops"),
    "preflight": ("recipes", "backends", "models", "training"),
    "ledger": ("recipes", "backends", "models", "training"),
}
OUTSIDE = {
    # folder: third-party packages it may import
    "recipes": ("tyro",),
    "backends": ("torch",),
}
NEURON = ("backends/neuron.py", "backends/neuron_cores.py")
FORBIDDEN_FILES = ("utils", "helpers", "common", "misc")
LONGER_THAN_300_LINES: dict[str, str] = {}
"""File: the reason that it may be longer."""

FILES = sorted(
    path for path in (*ROOT.glob("*.py"), *(p for folder in PACKAGES for p in ROOT.glob(f"{folder}/**/*.py"))) if path.is_file()
)
IDS = [str(path.relative_to(ROOT)) for path in FILES]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST) -> str | None:
    """Return a.b.c for a chain of attributes, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else None
    return None


def problems_with_imports(folder: str, names: set[str], standard_library: frozenset[str]) -> list[str]:
    allowed, outside = MAY_IMPORT[folder], OUTSIDE.get(folder)
    found = []
    for name in sorted(names):
        top = name.partition(".")[0]
        if top in (*PACKAGES, "train"):
            inside = top == folder or any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
            if not inside:
                found.append(name)
        elif outside is not None and top not in (*standard_library, *outside, "__future__"):
            found.append(name)
    return found


def problems_with_devices(where: str, tree: ast.Module) -> list[str]:
    """Names that belong to one backend, and comparisons with a device's name, outside the backend's own file."""
    found = []
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name and name.startswith("torch.cuda") and where != "backends/cuda.py":
            found.append(name)
        if name and name.startswith("torch.neuron") and where not in NEURON:
            found.append(name)
        if isinstance(node, ast.Import | ast.ImportFrom) and where not in NEURON:
            found += [alias for alias in imported(ast.Module([node], [])) if alias.startswith("torch_neuronx")]
        if isinstance(node, ast.Constant) and where not in NEURON:
            found += [node.value] if str(node.value).startswith(("NEURON_", "TORCH_NEURONX_")) else []
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                chain = dotted(side) or ""
                if chain.endswith((".device.type", "device_type", "backend.name")) or chain == "device.type":
                    found.append(f"comparison with {chain}")
    return found


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_go_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    if folder in MAY_IMPORT:
        assert problems_with_imports(folder, imported(parse(path)), sys.stdlib_module_names) == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_a_backend_knows_its_device(path):
    where = str(path.relative_to(ROOT))
    assert problems_with_devices(where, parse(path)) == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_files_stay_readable(path):
    where = str(path.relative_to(ROOT))
    assert path.stem not in FORBIDDEN_FILES
    if where not in LONGER_THAN_300_LINES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    assert path.read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_public_names_have_a_docstring(path):
    tree = parse(path)
    missing = [] if ast.get_docstring(tree) or path.name == "__init__.py" else ["module"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [node.name]
    assert missing == []


@pytest.mark.parametrize(
    "folder, source, culprit",
    [
        ("recipes", "import torch", "torch"),
        ("recipes", "from training.data import Batch", "training.data.Batch"),
        ("models", "from backends.cpu import CpuBackend", "backends.cpu.CpuBackend"),
        ("models", "import train", "train"),
        ("training", "from models.qwen3.model import Qwen3", "models.qwen3.model.Qwen3"),
        ("training", "from backends import get_backend", "backends.get_backend"),
        ("backends", "import numpy", "numpy"),
        ("backends", "def f():\n    from recipes.base import Run", "recipes.base.Run"),
    ],
)
def test_the_import_rule_catches(folder, source, culprit):
    assert problems_with_imports(folder, imported(ast.parse(source)), sys.stdlib_module_names) == [culprit]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()",
        "x = torch.neuron.device_count()",
        "import torch_neuronx",
        "from torch_neuronx.metrics import report",
        "import os\nos.environ['NEURON_RT_NUM_CORES'] = '4'",
        "flag = 'TORCH_NEURONX_METRICS_ENABLED'",
        "if x.device.type == 'cuda': pass",
        "y = 1 if device.type != 'cpu' else 2",
        "if self.backend.name == 'neuron': pass",
        "if device_type in ('cuda', 'xpu'): pass",
    ],
)
def test_the_device_rule_catches(source):
    assert problems_with_devices("training/anything.py", ast.parse(source))


def test_the_device_rule_lets_the_backends_speak():
    assert problems_with_devices("backends/cuda.py", ast.parse("import torch\ntorch.cuda.synchronize()")) == []
    assert problems_with_devices("backends/neuron.py", ast.parse("name = 'NEURON_RT_NUM_CORES'\nimport torch_neuronx")) == []
