"""Import rules. `lint-imports` enforces the same rules for whole packages. This test needs no installed package, and covers
the examples, which represent third parties."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/titan-core"
PLUGINS = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml") if path.parent != CORE)
MODULES = {path.name.replace("-", "_") for path in PLUGINS}
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/pyproject.toml"))

REFERENCE = re.compile(r"titan_core\.|titan_\w+[.\w]*:\w")  # "titan_core.train.trainer:train"; names of slots have no colon


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that ``file`` imports anywhere (also under TYPE_CHECKING), and those that its references name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from titan_core import train` imports a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and REFERENCE.match(node.value):
            yield node.value.partition(":")[0]


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


def test_the_core_has_no_import_cycles() -> None:
    source = CORE / "src"
    files = {".".join(file.relative_to(source).with_suffix("").parts): file for file in source.rglob("*.py")}
    graph = {
        name: {known for one in imported(file) for known in (one, one.rpartition(".")[0]) if known in files} - {name}
        for name, file in files.items()
        if not name.endswith("plugin")  # its references name code that is loaded later
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


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


def private_names(file: Path) -> Iterator[str]:
    """Yield the private names of torch and torchao that ``file`` imports or reads from their modules."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if is_of_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name for alias in node.names if is_of_torch(node.module)}
        else:
            continue
        yield from (name for name in found if is_of_torch(name) and is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            if path.split(".")[0] in modules:
                yield path


def is_of_torch(name: str) -> bool:
    return name.split(".")[0] in ("torch", "torchao")


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


@pytest.mark.parametrize("package", [CORE, *PLUGINS], ids=lambda path: path.name)
def test_private_torch_api_is_used_in_one_module_of_a_package(package: Path) -> None:
    """A torch upgrade then changes one file per package. (ruff's SLF001 enforces the same for attributes of objects.)"""
    files = [file for file in (package / "src").rglob("*.py") if file.name != "torch_private.py"]
    assert files
    assert {(file.name, name) for file in files for name in private_names(file)} == set()


def lines_of_code(file: Path) -> int:
    """Lines with code, without imports, docstrings, comments and blank lines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    omitted: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if is_text or (isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset == 0):
            assert isinstance(node, ast.stmt)
            omitted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used: set[int] = set()
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with tokenize.open(file) as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type not in blank:
                used.update(range(token.start[0], token.end[0] + 1))
    return len(used - omitted)


def test_the_core_stays_small() -> None:
    """What only some jobs need belongs in a package of its own."""
    lines = {file: lines_of_code(file) for file in (CORE / "src").rglob("*.py")}
    contract = sum(count for file, count in lines.items() if "api" in file.parts)
    assert contract < 4100  # with records in bounded memory
    assert sum(lines.values()) < 10900  # with the table of what plugins return


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
