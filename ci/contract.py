"""Records the contract that plugins are written against, the names of ``titan_core.api`` with their signatures, and the hook
specs::

    uv run python -m ci.contract

The record (``packages/titan-core/contract.txt``) makes each change visible in review, and changes only together with
``API_VERSION``: a change that breaks plugins needs a new major number, an addition a new minor number.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path

from ci.workspace import ROOT

API = ROOT / "packages/titan-core/src/titan_core/api"
FILE = ROOT / "packages/titan-core/contract.txt"
HOOKS = "hooks"
"""The chapter of the record with the hook specs."""


def contents() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return chapter -> file -> promised names."""
    table: Mapping[str, Mapping[str, str]] = runpy.run_path(str(API / "_contents.py"))["CONTENTS"]
    return {chapter: {file: tuple(names.split()) for file, names in files.items()} for chapter, files in table.items()}


def render() -> str:
    """Return the record's text: the version, and per chapter the definition of each name without docstrings and bodies."""
    version = _assigned(API / "__init__.py", "API_VERSION")
    blocks = [f"version {version[0]}.{version[1]}"]
    for chapter, files in contents().items():
        lines = [line for file, names in files.items() for line in _definitions(file, names)]
        blocks.append("\n".join([chapter, *(f"    {line}" for line in lines)]))
    specs = ast.parse((API / "hookspecs.py").read_text(encoding="utf-8"))
    hooks = [node for node in specs.body if isinstance(node, ast.FunctionDef) and node.name.startswith("titan_")]
    lines = [line for node in hooks for line in _public([node])]
    blocks.append("\n".join([HOOKS, *(f"    {line}" for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _assigned(file: Path, name: str) -> tuple[int, int]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
            major, minor = ast.literal_eval(node.value)
            return major, minor
    raise LookupError(f"{file} does not assign {name}")


def _definitions(file: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines that define ``names`` in a file of the contract.

    Raises:
        LookupError: the file does not define one of them.
    """
    path = API / f"{file.replace('.', '/')}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = {name: node for node in body for name in _names(node)}
    for name in names:
        if name not in found:
            raise LookupError(f"{path} does not define {name}")
        yield from _public([found[name]])


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(name)):
            yield name
        case ast.Assign(targets=[ast.Name(name)]):
            yield name


def _public(body: list[ast.stmt]) -> Iterator[str]:
    """Yield one line for each public name that ``body`` defines; those of a class follow it, indented."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not _is_private(node.name):
                yield from _decorated(node, f"def {node.name}({ast.unparse(node.args)}){_returns(node)}")
            case ast.ClassDef() if not _is_private(node.name):
                bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
                yield from _decorated(node, f"class {node.name}({bases})" if bases else f"class {node.name}")
                yield from (f"    {line}" for line in _public(node.body))
            case ast.AnnAssign(target=ast.Name(name)) if not _is_private(name):
                yield ast.unparse(node)
            case ast.Assign(targets=[ast.Name(name)]) if not _is_private(name):
                yield ast.unparse(node)
            case ast.If() if ast.unparse(node.test) != "TYPE_CHECKING":
                yield from _public([*node.body, *node.orelse])


def _decorated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, line: str) -> Iterator[str]:
    yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
    yield line


def _returns(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def importable_names() -> set[str]:
    """Return the names that authors may import."""
    return {"API_VERSION"} | {name for files in contents().values() for names in files.values() for name in names}


def hook_names() -> set[str]:
    """Return the names of the hook specs."""
    return set(re.findall(r"^def (titan_\w+)", (API / "hookspecs.py").read_text(encoding="utf-8"), re.MULTILINE))


def main() -> None:
    """Write the record."""
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
