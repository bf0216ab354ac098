"""Import rules. `lint-imports` enforces the same rules for whole packages. This test needs no installed package, and covers
the examples, which represent third parties."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import titan_core.api
from ci.contract import API, contents, importable_names
from ci.house import import_cycle, imported, private_names
from ci.workspace import KIT, packages

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/titan-core"
OTHERS = sorted(package.folder for package in packages().values() if package.folder != CORE and package.name != KIT)
"""The kit is not among them: it tests what the core computes, as these tests do."""
PLUGINS = {package.module for package in packages().values() if package.plugins and package.folder != CORE}
LIBRARIES = {package.module for package in packages().values() if not package.plugins}
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))


def of_the_core(package: Path) -> set[tuple[str, str]]:
    """Return (file, module of the core that it imports)."""
    files = list((package / "src").rglob("*.py"))
    assert files
    return {(file.name, name) for file in files for name in imported(file) if name.split(".")[0] == "titan_core"}


@pytest.mark.parametrize("package", EXAMPLES, ids=lambda path: path.name)
def test_a_third_party_imports_names_of_the_contract_from_its_one_path(package: Path) -> None:
    promised = {f"titan_core.api.{name}" for name in importable_names()}
    assert {(file, name) for file, name in of_the_core(package) if name not in promised} == set()


@pytest.mark.parametrize("package", OTHERS, ids=lambda path: path.name)
def test_a_package_of_ours_imports_the_contract_and_the_toolkit_and_nothing_else_of_the_core(package: Path) -> None:
    """Of the contract's files also the names that third parties are not promised, but no private ones."""
    allowed = re.compile(r"titan_core\.(api|toolkit)(\.(?!_)\w+)+")
    assert {(file, name) for file, name in of_the_core(package) if not allowed.fullmatch(name)} == set()


def test_chapters_have_the_names_of_the_table_of_contents() -> None:
    """Type checkers read the chapters, the interpreter the table."""
    assert set(titan_core.api.__all__) == importable_names()
    for chapter, files in contents().items():
        tree = ast.parse((API / chapter / "__init__.py").read_text(encoding="utf-8"))
        listed = {
            (f"{node.module}", alias.asname)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and alias_all(node)
            for alias in node.names
        }
        assert listed == {(f"titan_core.api.{file}", name) for file, names in files.items() for name in names}
        documented = re.findall(r"^\* ``(\w+)``: ", ast.get_docstring(tree) or "", re.MULTILINE)
        assert sorted(documented) == sorted(name for names in files.values() for name in names)


def alias_all(node: ast.ImportFrom) -> bool:
    return all(alias.asname == alias.name for alias in node.names)


def test_files_of_the_contract_import_files_and_never_its_front() -> None:
    """A file that imported a chapter would import all its files, and be part of a cycle."""
    fronts = {"titan_core.api", *(f"titan_core.api.{chapter}" for chapter in contents())}
    files = [file for file in API.rglob("*.py") if file != API / "__init__.py"]
    nodes = [
        (file.name, node.module)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    assert nodes
    assert [(file, module) for file, module in nodes if module in fronts] == []


def test_each_name_can_be_imported() -> None:
    assert [name for name in importable_names() if getattr(titan_core.api, name) is None] == []


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from titan_core.api import Nothing")


@pytest.mark.parametrize("package", [CORE, *OTHERS], ids=lambda path: path.name)
def test_no_package_imports_or_requires_a_plugin(package: Path) -> None:
    """Packages share code through the contract and through libraries, which register nothing. The core needs neither."""
    own = package.name.replace("-", "_")
    refused = (PLUGINS if own in PLUGINS else PLUGINS | LIBRARIES) - {own}
    files = list((package / "src").rglob("*.py"))
    assert files
    assert {(file.name, name) for file in files for name in imported(file) if name.split(".")[0] in refused} == set()
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    names = {re.split(r"[^\w-]", one)[0].replace("-", "_") for group in required for one in group}
    assert names & refused == set()


def test_the_rules_of_import_linter_and_mypy_cover_all_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    linter = settings["importlinter"]
    _, ours, order = linter["contracts"]
    assert set(ours["source_modules"]) == (PLUGINS | LIBRARIES) - {packages()[KIT].module}
    assert [set(layer.split(" | ")) for layer in order["layers"]] == [PLUGINS, LIBRARIES, {"titan_core"}]
    everything = PLUGINS | LIBRARIES | {"titan_core"}
    assert set(linter["root_packages"]) == everything
    assert set(settings["mypy"]["packages"]) == everything | {"ci"}
    assert {Path(path).parent.name.replace("-", "_") for path in settings["mypy"]["mypy_path"]} == everything


def test_the_contract_imports_nothing_else_of_the_core() -> None:
    found = {
        (file.name, name) for file in API.rglob("*.py") for name in imported(file) if name.split(".")[0] == "titan_core"
    }
    allowed = ("titan_core.api", "titan_core.torch_private")
    assert {(file, name) for file, name in found if not name.startswith(allowed)} == set()


@pytest.mark.parametrize("package", packages())
def test_no_package_has_an_import_cycle(package: str) -> None:
    """Imports inside functions and under ``TYPE_CHECKING`` count too."""
    assert import_cycle(package) == []
    assert import_cycle(package, folders=True) == []


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


@pytest.mark.parametrize("package", [CORE, *OTHERS], ids=lambda path: path.name)
def test_private_torch_api_is_used_in_one_module_of_a_package(package: Path) -> None:
    """A torch upgrade then changes one file per package. (ruff's SLF001 enforces the same for attributes of objects.)"""
    files = [file for file in (package / "src").rglob("*.py") if file.name != "torch_private.py"]
    assert files
    assert {(file.name, name) for file in files for name in private_names(file)} == set()


@pytest.mark.parametrize("package", [CORE, *OTHERS], ids=lambda path: path.name)
def test_who_uses_private_names_of_torch_bounds_it_from_above(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [one for one in project["dependencies"] if re.match(r"torch\b", one)]
    uses = bool(list((package / "src").rglob("torch_private.py")))
    assert all(("<" in bound) == uses for bound in bounds)


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
