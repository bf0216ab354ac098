"""Every private name of torch that a package uses exists in the installed torch. ``.ci/run`` tries the lowest torch that
Titan allows as well as the locked one (``python -m ci titan --resolution lowest-direct``)."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ci.workspace import ROOT

FILES = sorted(ROOT.glob("packages/*/src/**/torch_private.py"))
LIBRARIES = ("torch", "torchao", "torchft")
NEEDS_CUDA = () if torch.version.cuda else ("cuda",)
"""Parts of names that builds of torch for the CPU lack."""


def module_of(file: Path) -> ModuleType:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(".".join(parts[parts.index("src") + 1 :]))


def imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield module and name of each import from a library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name,) for alias in node.names if alias.name.partition(".")[0] in LIBRARIES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            yield from ((str(node.module), alias.name) for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield each dotted name, such as ``torch._C._get_dispatch_mode``, the longest alone."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names: list[str] = []
            part: ast.expr = node
            while isinstance(part, ast.Attribute):
                inner.add(id(part))
                names.append(part.attr)
                part = part.value
            if isinstance(part, ast.Name):
                yield (part.id, *reversed(names))


def missing(module: ModuleType, tree: ast.AST) -> Iterator[str]:
    for name, *what in imported(tree):
        try:
            found = importlib.import_module(name)
            if what and not hasattr(found, what[0]):
                importlib.import_module(f"{name}.{what[0]}")
        except ImportError:
            yield ".".join((name, *what))
    for root, *names in attributes(tree):
        value = vars(module).get(root)  # names of variables in functions are not known here: tests of their own try them
        for name in names if value is not None else ():
            if not hasattr(value, name):
                yield ".".join((root, *names))
                break
            value = getattr(value, name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parts[-2])
def test_private_names_exist(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [name for names in (*imported(tree), *attributes(tree)) for name in names]
    assert any(name.startswith("_") or "._" in name for name in names)
    gone = [name for name in missing(module_of(file), tree) if not any(part in name for part in NEEDS_CUDA)]
    assert gone == []


def test_a_name_that_is_gone_is_found() -> None:
    source = "import torch\nfrom torch._C import _gone_b\nx = torch._C._gone_a.deeper\ny = torch.ops.aten._gone_c.default\n"
    module = ModuleType("example")
    module.torch = torch  # type: ignore[attr-defined]
    gone = ["torch._C._gone_b", "torch._C._gone_a.deeper", "torch.ops.aten._gone_c.default"]
    assert list(missing(module, ast.parse(source))) == gone
