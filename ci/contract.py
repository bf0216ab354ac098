"""Records the public names and signatures of ``titan_core.api``, the contract that plugins are written against::

    uv run python -m ci.contract

The record makes each change of the contract visible in review. A change that breaks plugins raises the major number of
``API_VERSION``, an addition the minor number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ci.workspace import ROOT

API = ROOT / "packages/titan-core/src/titan_core/api"
FILE = ROOT / "packages/titan-core/contract.txt"


def render() -> str:
    """The record's text: per module, one line for each public name, without docstrings and bodies."""
    blocks = []
    for file in sorted(API.rglob("*.py")):
        if file.name == "torch_private.py" or (file.name.startswith("_") and file.name != "__init__.py"):
            continue
        lines = list(_public(ast.parse(file.read_text(encoding="utf-8")).body))
        if lines:
            module = ".".join(file.relative_to(API.parents[1]).with_suffix("").parts).removesuffix(".__init__")
            blocks.append("\n".join([module, *(f"    {line}" for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _public(body: list[ast.stmt]) -> Iterator[str]:
    """One line for each public name that ``body`` defines; those of a class follow it, indented."""
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
    """Return the names that authors may import, as the record has them."""
    return {name for line in _record() if (name := _name(line)) and not name.startswith("titan_")}


def hook_names() -> set[str]:
    """Return the hook specs, as the record has them."""
    return {name for line in _record() if (name := _name(line)).startswith("titan_")}


def _record() -> list[str]:
    return [line.strip() for line in FILE.read_text(encoding="utf-8").splitlines() if re.match(r"    [^ @]", line)]


def _name(line: str) -> str:
    return re.split(r"[^\w]", line.removeprefix("class ").removeprefix("def "))[0]


def main() -> None:
    """Write the record."""
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
