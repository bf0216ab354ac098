"""Records the contract that plugins are written against, the names of ``titan_core.api`` with their signatures, and the hook
specs::

    uv run python -m ci.contract

The record (``packages/titan-core/contract.txt``) makes each change visible in review. Once ``API_VERSION`` is above (1, 0),
the version of the first release, it changes only together with it: a change that breaks plugins needs a new major number, an
addition a new minor number.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


MADE_BY_TITAN = frozenset(
    """
    BatchPlan CheckpointContext CheckpointEvents CommandContext Config DataPosition DatasetContext Decoding HealthContext Job
    JobContext JobMesh LRScheduleContext MeshPlan Microbatch ModelPart ModelTrial ModuleCall OptimizerContext
    ParamGroup PendingUpdate Registry Run RunEnd Shares SharedRequest StepInput StepReport TokenizerContext TrainState
    TrainedParameter TrainingContext ValidationReport WeightsContext World
    """.split()  # noqa: SIM905
)
"""Classes and protocols that plugins receive and neither construct nor implement: a new member breaks none of them."""


@dataclass
class Changes:
    """How the contract differs from its record, a line each."""

    breaking: list[str]
    added: list[str]


def changes(before: str, after: str) -> Changes:
    """Return how the record ``after`` differs from ``before``."""
    old, new = _entries(before), _entries(after)
    found = Changes(
        [f"{name}: removed" for name in old.keys() - new.keys()], [f"{name}: new" for name in new.keys() - old.keys()]
    )
    for name in sorted(old.keys() & new.keys()):
        was, now = old[name], new[name]
        for member in was.keys() | now.keys():
            where = f"{name}.{member}" if member else name
            if member not in now:
                found.breaking.append(f"{where}: removed")
            elif member not in was:
                required = name not in MADE_BY_TITAN and _is_required(now[member], now[""])
                (found.breaking if required else found.added).append(f"{where}: new")
            elif was[member] != now[member]:
                accepts = _accepts_the_calls_of(was[member], now[member]) or now[member].startswith(f"{was[member]} | ")
                (found.added if accepts else found.breaking).append(f"{where}: {was[member]} -> {now[member]}")
    return Changes(sorted(found.breaking), sorted(found.added))


def _entries(record: str) -> dict[str, dict[str, str]]:
    """Return name -> member -> its lines; the definition itself is the member ``""``."""
    found: dict[str, dict[str, str]] = {}
    decorators, name = "", ""
    for line in record.splitlines():
        text = line.strip()
        if not line.startswith("    "):
            continue
        if text.startswith("@"):
            decorators += f"{text} "
            continue
        own = re.split(r"\W", text.removeprefix("class ").removeprefix("async ").removeprefix("def "))[0]
        if not line.startswith("     "):
            name = own
        found.setdefault(name, {})["" if own == name and not line.startswith("     ") else own] = decorators + text
        decorators = ""
    return found


def _is_required(member: str, definition: str) -> bool:
    """Whether a new member must be given by who constructs a dataclass, or implemented by who implements a protocol."""
    if "@abstractmethod" in member or ("(Protocol" in definition and "def " in member):
        return True
    return definition.startswith("@dataclass") and "def " not in member and "=" not in member and "ClassVar" not in member


def _accepts_the_calls_of(before: str, after: str) -> bool:
    """Whether a function or hook spec has only new parameters that a caller, or an implementation, may leave out."""
    try:
        was, now = (ast.parse(f"{line[line.index('def ') :]}: ...").body[0] for line in (before, after))
    except (SyntaxError, ValueError):
        return False
    if not (isinstance(was, ast.FunctionDef) and isinstance(now, ast.FunctionDef)) or _returns(was) != _returns(now):
        return False
    kept = now.args.args[: len(was.args.args)]
    same = [ast.unparse(one) for one in kept] == [ast.unparse(one) for one in was.args.args]
    more = now.args.args[len(was.args.args) :]
    optional = now.name.startswith("titan_") or len(now.args.defaults) >= len(more) + len(was.args.defaults)
    keywords = [ast.unparse(one) for one in was.args.kwonlyargs]
    return same and optional and keywords == [ast.unparse(one) for one in now.args.kwonlyargs][: len(keywords)]


def missing_bump(before: str, after: str) -> str:
    """Return why ``API_VERSION`` does not fit the changes; empty if it does."""
    was, now = (tuple(map(int, text.split()[1].split("."))) for text in (before, after))
    found = changes(before, after)
    if was <= (1, 0):
        return ""  # not released: nothing is promised yet
    if found.breaking and now[0] == was[0]:
        return "\n".join(["these changes break plugins: raise the major number of API_VERSION", *found.breaking])
    if found.added and now <= was:
        return "\n".join(["these are additions: raise the minor number of API_VERSION", *found.added])
    return ""


def main() -> None:
    """Write the record, if the version fits the changes."""
    before, after = FILE.read_text(encoding="utf-8"), render()
    if why := missing_bump(before, after):
        raise SystemExit(why)
    FILE.write_text(after, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
