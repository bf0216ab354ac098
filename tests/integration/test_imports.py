"""Import rules. `lint-imports` enforces the same rules for whole packages. This test needs no installed package, and covers
the examples, which represent third parties."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from ci.house import import_cycle, imported, private_names
from ci.workspace import packages

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/titan-core"
PLUGINS = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml") if path.parent != CORE)
MODULES = {path.name.replace("-", "_") for path in PLUGINS}
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))


@pytest.mark.parametrize("package", [*PLUGINS, *EXAMPLES], ids=lambda path: path.name)
def test_a_plugin_imports_the_contract_and_nothing_else_of_the_core(package: Path) -> None:
    files = list((package / "src").rglob("*.py"))
    assert files
    found = {(file.name, name) for file in files for name in imported(file) if name.split(".")[0] == "titan_core"}
    assert {(file, name) for file, name in found if not name.startswith("titan_core.api")} == set()


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_no_package_imports_or_requires_a_plugin(package: Path) -> None:
    """Packages share code through the contract. A library beside the plugins would be a second contract."""
    others = MODULES - {package.name.replace("-", "_")}
    files = list((package / "src").rglob("*.py"))
    assert files
    assert {(file.name, name) for file in files for name in imported(file) if name.split(".")[0] in others} == set()
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    assert {one for group in required for one in group if re.split(r"[^\w-]", one)[0].replace("-", "_") in others} == set()


def test_the_rules_of_import_linter_and_mypy_cover_all_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    linter = settings["importlinter"]
    lists = [contract.get("modules") or contract.get("source_modules") for contract in linter["contracts"]]
    lists += [contract.get("forbidden_modules") for contract in linter["contracts"]]
    plugins = [set(one) for one in lists if one and MODULES & set(one)]
    assert len(plugins) == 3
    assert all(one == MODULES for one in plugins)
    assert set(linter["root_packages"]) == MODULES | {"titan_core"}
    assert set(settings["mypy"]["packages"]) == MODULES | {"titan_core", "ci"}
    assert {Path(path).parent.name.replace("-", "_") for path in settings["mypy"]["mypy_path"]} == MODULES | {"titan_core"}


def test_the_contract_imports_nothing_else_of_the_core() -> None:
    files = list((CORE / "src/titan_core/api").rglob("*.py"))
    found = {(file.name, name) for file in files for name in imported(file) if name.split(".")[0] == "titan_core"}
    assert {(file, name) for file, name in found if not name.startswith("titan_core.api")} == set()


@pytest.mark.parametrize("package", packages())
def test_no_package_has_an_import_cycle(package: str) -> None:
    """Imports inside functions and under ``TYPE_CHECKING`` count too."""
    assert import_cycle(package) == []


def test_sections_are_found_by_class() -> None:
    """A quoted name would let code read the section of a plugin that it cannot import."""
    sources = [*(ROOT / "packages").rglob("src/**/*.py"), *(ROOT / "examples").rglob("src/**/*.py")]
    assert sources
    by_name = [
        f"{file.name}:{node.lineno}"
        for file in sources
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "value"
        and any(isinstance(one, ast.Constant | ast.JoinedStr) for one in node.args)
    ]
    assert by_name == []


def test_no_class_shares_its_name_with_one_of_the_contract() -> None:
    """Neither do two classes of the core: a name in an error, a signature or a search has one meaning."""
    places: dict[str, set[Path]] = {}
    for file in (ROOT / "packages").rglob("src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(file)
    assert places
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {name for name, files in shared.items() if any(CORE in file.parents for file in files)} == set()


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_private_torch_api_is_used_in_one_module_of_a_package(package: Path) -> None:
    """A torch upgrade then changes one file per package. (ruff's SLF001 enforces the same for attributes of objects.)"""
    files = [file for file in (package / "src").rglob("*.py") if file.name != "torch_private.py"]
    assert files
    assert {(file.name, name) for file in files for name in private_names(file)} == set()


def test_the_core_names_no_plugin() -> None:
    """The core knows no model, logger, precision or weight format by name."""
    names = re.compile("llama|wandb|tensorboard|float8|hugging", re.IGNORECASE)
    found = [
        f"{file.relative_to(CORE)}:{number}: {line.strip()}"
        for file in (CORE / "src").rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if names.search(line)
    ]
    assert found == []
