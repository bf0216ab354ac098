"""A package's suite needs only that package, its declared dependencies and the harness, so it passes without any other
package. For the suite's jobs, ``tests/conftest.py`` ensures this: it disables the plugins of all other packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ci.workspace import KIT, ROOT, Package, packages, with_dependencies
from harness.suites import disabled_in

OPTIONAL = ROOT / "tests/harness/fake_cuda.py"
"""Imports titan-simulate if it is installed; tests that need it skip themselves otherwise."""
LOCAL = {"harness": ROOT / "tests", "benchmarks": ROOT, "ci": ROOT}
"""Folders that contain modules outside the packages."""


SLOTS = {
    name
    for file in ROOT.glob("packages/*/src/*/*.py")
    for name in re.findall(r'Slot\(\s*name="([\w.]+)"', file.read_text(encoding="utf-8"))
}
"""Names of slots, which look like those of modules."""


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the modules that ``file`` imports anywhere, and those that its strings name. A slot's name is no module."""
    return frozenset(_imported(file))


def _imported(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("titan_", "harness."))
            and node.value not in SLOTS
        ):
            yield node.value.partition(":")[0]


def local_file(module: str) -> Path | None:
    folder = LOCAL.get(module.partition(".")[0])
    file = folder / f"{module.replace('.', '/')}.py" if folder is not None else None
    return file if file is not None and file.is_file() else None


def reached(files: list[Path]) -> dict[str, Path]:
    """Return every module that ``files`` import directly or through the harness, with a file that imports it."""
    found: dict[str, Path] = {}
    waiting, seen = list(files), {*files, OPTIONAL}
    while waiting:
        file = waiting.pop()
        for name in imported(file):
            found.setdefault(name, file)
            inner = local_file(name)
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)
    return found


@pytest.mark.parametrize("package", packages().values(), ids=lambda one: one.name)
def test_a_suite_imports_no_other_package(package: Package) -> None:
    installed = {one.name for name in (package.name, KIT) for one in with_dependencies(name)}
    others = {one.module for one in packages().values() if one.name not in installed}
    files = [*package.suite.rglob("*.py"), ROOT / "tests/conftest.py"]
    assert len(files) > 1, f"{package.name} has no tests in {package.suite}"
    # Every suite discovers the harness plugin through its metadata, so no import leads there.
    found = reached([*files, ROOT / "tests/harness/plugin.py", ROOT / "tests/harness/parallel.py"])
    wrong = {f"{file.relative_to(ROOT)}: {name}" for name, file in found.items() if name.partition(".")[0] in others}
    assert wrong == set(), "tests of several packages belong to tests/integration"


def test_a_suite_sees_only_its_own_plugins() -> None:
    everything = {plugin for one in packages().values() for plugin in one.plugins}
    for package in packages().values():
        seen = everything - set(disabled_in(package.suite / "test_x.py"))
        wanted = (one for name in (package.name, KIT) for one in with_dependencies(name))
        assert seen == {plugin for one in wanted for plugin in one.plugins} >= {"core"}
    assert everything.isdisjoint(disabled_in(ROOT / "tests/integration/test_x.py"))
