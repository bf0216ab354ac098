"""What packages declare of their dependencies: everything that they import, with one lowest version. ``python -m ci PACKAGE
--resolution lowest-direct`` tries these versions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.bounds import floors, unreachable
from ci.short_list import TESTS
from ci.workspace import ROOT, Package, packages, requirement_name

DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
    "lm_eval": "lm-eval",
    "transformers": "lm-eval",
    "upath": "universal-pathlib",
}
"""Import package -> distribution, where the names differ, or a dependency brings what it is used with."""


def third_party(file: Path) -> Iterator[str]:
    """Yield the import packages from other projects that ``file`` imports at run time."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [str(node.module)]
        for module in modules:
            name = module.partition(".")[0]
            if name not in sys.stdlib_module_names and name != "__future__":
                yield name


@pytest.mark.parametrize("package", packages().values(), ids=lambda one: one.name)
def test_a_package_declares_what_it_imports(package: Package) -> None:
    optional = [one for extra in package.project.get("optional-dependencies", {}).values() for one in extra]
    declared = {requirement_name(one) for one in [*package.project["dependencies"], *optional]}
    used = {name for file in (package.folder / "src").rglob("*.py") for name in third_party(file)}
    own = used & declared  # of transformers, which others have through lm-eval
    names = own | {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in used - own - {package.module}}
    assert names <= declared


def test_a_dependency_has_one_lowest_version() -> None:
    """Installed together, packages have the highest of their lowest versions: a lower one would be tried by nobody."""
    found: dict[str, set[str]] = {}
    for package in packages().values():
        optional = [one for extra in package.project.get("optional-dependencies", {}).values() for one in extra]
        for name, versions in floors([*package.project["dependencies"], *optional]).items():
            found.setdefault(name, set()).update(versions)
    assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}
    assert found["torch"] == {"2.11"}


def test_every_dependency_has_a_lowest_version() -> None:
    for package in packages().values():
        for requirement in package.project["dependencies"]:
            assert requirement_name(requirement) in floors([requirement]), f"{package.name}: {requirement}"


def test_a_lowest_version_that_nothing_can_install_is_found() -> None:
    declared = ["a>=1.0,!=1.5", "b[x]>=2.1; python_version < '3.14'", "c>=12.5", "D.e_f>=3", "not-installed>=1"]
    pins = "a==1\nb[x]==2.1.0\nc==12.5.77\nd-e-f==3.0.0+cpu\n    # via a\ng==4\n"
    assert unreachable(declared, pins) == {"c": "12.5.77"}


@pytest.mark.parametrize("test", TESTS)
def test_the_short_list_names_tests_that_exist(test: str) -> None:
    file, _, name = test.partition("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert not name or name in functions
