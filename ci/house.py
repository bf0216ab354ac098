"""Measures what a maintainer must carry and what an author of a plugin must know::

    uv run python -m ci.house [--trace] [--rooms]

Prints the names of the contract; by package the files, those of at most 40 lines of code (``small``), the lines of code, the
functions, and the private functions whose name occurs once (``once``); the lines of tests; the private names of torch; the
import cycles; and with ``--trace`` the files that take part in one step and that pass one value of the config, by running
``titan train llama3_debug``. A line of code is one without docstrings, comments, imports and blanks.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from ci.contract import hook_names, importable_names
from ci.workspace import ROOT, packages

_REFERENCE = re.compile(r"titan_core\.|titan_\w+[.\w]*:\w")  # "titan_core.loop.training:train"; names of slots have no colon
_ATEN = re.compile(r"(torch\.ops\.)?_?aten\._\w+$", re.IGNORECASE)
SMALL = 40
"""Lines of code of a small file."""
OPERATOR = "aten::"
"""Begins the name of an operator. torch checks that the schemas of its operators stay compatible, whatever their names."""
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def source_files(package: str) -> list[Path]:
    """Return the Python files of a package's ``src`` folder, sorted."""
    return sorted((packages()[package].folder / "src").rglob("*.py"))


def lines_of_code(file: Path) -> int:
    """Return the number of lines with code in ``file``."""
    omitted: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if is_text or (isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset == 0):
            assert isinstance(node, ast.stmt)
            omitted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used: set[int] = set()
    with tokenize.open(file) as text:
        for token in tokenize.generate_tokens(text.readline):
            if token.type not in _LAYOUT:
                used.update(range(token.start[0], token.end[0] + 1))
    return len(used - omitted)


@dataclass
class Size:
    """Counts of a package or a room. ``small`` counts files of at most :data:`SMALL` lines of code but more than none, and
    ``once`` the private functions whose name occurs in the package only once beside their definition."""

    files: int = 0
    small: int = 0
    lines: int = 0
    functions: int = 0
    once: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return f"{self.files:5,}  {self.small:5,}  {self.lines:13,}  {self.functions:9,}  {self.once:5,}"


def sizes(package: str) -> Mapping[str, Size]:
    """Return room -> size, the largest first. A room is a folder or a file at the top of the package."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in source_files(package)}
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    found: dict[str, Size] = defaultdict(Size)
    for file, tree in trees.items():
        room = file.relative_to(packages()[package].folder / "src" / packages()[package].module).parts[0]
        functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        once = sum(name.startswith("_") and not name.endswith("__") and used[name] == 1 for name in functions)
        lines = lines_of_code(file)
        found[room] += Size(1, 0 < lines <= SMALL, lines, len(functions), once)
    return dict(sorted(found.items(), key=lambda one: -one[1].lines))


def imported(file: Path, references: bool = True) -> Iterator[str]:
    """Yield the modules that ``file`` imports anywhere, also under ``TYPE_CHECKING``.

    Args:
        references: whether to yield those that its strings name too, such as ``"titan_core.loop.training:train"``.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from titan_core import loop` imports a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif references and isinstance(node, ast.Constant) and isinstance(node.value, str) and _REFERENCE.match(node.value):
            yield node.value.partition(":")[0]


def import_cycle(package: str, folders: bool = False) -> list[str]:
    """Return the modules of an import cycle within ``package``, imports in functions included; empty if there is none.

    Args:
        folders: whether to return a cycle of its folders and of the modules beside them instead.
    """
    source = packages()[package].folder / "src"
    files = {".".join(file.relative_to(source).with_suffix("").parts): file for file in source_files(package)}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        if name.endswith("plugin"):
            continue  # its references name code that is loaded later
        found = {known for one in imported(file) for known in (one, one.rpartition(".")[0]) if known in files}
        node = _folder(name) if folders else name
        graph.setdefault(node, set()).update({_folder(one) if folders else one for one in found} - {node})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


def private_names(file: Path) -> Iterator[str]:
    """Yield the private names of torch and torchao that ``file`` imports or reads from their modules, operators included. Of
    a ``torch_private.py``, which is about nothing else, also the private attributes of any object."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports: dict[str, str] = {}  # name in the file -> path
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            for alias in node.names:
                top = alias.name.split(".")[0]
                imports[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            imports |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        else:
            continue
        yield from (name for name in found if _is_of_torch(name) and _is_private(name))
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            first, dot, rest = ast.unparse(node).partition(".")
            path = imports.get(first, "") + dot + rest
            if _ATEN.match(first + dot + rest):
                yield f"{OPERATOR}{node.attr}"
            elif _is_of_torch(path):
                yield path
            elif file.name == "torch_private.py" and node.attr not in own:
                yield f"?.{node.attr}"


def named_operators(file: Path) -> Iterator[str]:
    """Yield the private operators that ``file`` recognises by their names, as strings."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{OPERATOR}_"):
            yield node.value


def most_specific(names: set[str]) -> set[str]:
    """Return ``names`` without the modules and classes that only lead to another one."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _is_of_torch(name: str) -> bool:
    return name.split(".")[0] in ("torch", "torchao")


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def _print_sizes(rooms: bool) -> None:
    print(f"contract: {len(importable_names())} names, {len(hook_names())} hook specs\n")
    print(f"{'package':21}  files  small  lines of code  functions   once\n{'-' * 63}")
    total = Size()
    for package in packages():
        found = sizes(package)
        whole = sum(found.values(), Size())
        total += whole
        print(f"{package:21}  {whole}")
        if rooms:
            for room, size in found.items():
                print(f"  {room:19}  {size}")
    print(f"{'total':21}  {total}\n")
    tests = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / "tests").rglob("*.py"))
    print(f"lines of tests: {tests:,}")
    files = [file for package in packages() for file in source_files(package)]
    private = {name for file in files for name in private_names(file)}
    operators = {name for name in private if name.startswith(OPERATOR)}
    private -= operators
    operators |= {name for file in files for name in named_operators(file)}
    print(f"private names of torch: {len(most_specific(private))}, and {len(operators)} of its operators")
    for folders, of in ((False, "modules"), (True, "folders")):
        cycles = {package: cycle for package in packages() if (cycle := import_cycle(package, folders))}
        for package, cycle in cycles.items():
            print(f"cycle of {of} in {package}: {' -> '.join(cycle)}")
        print(f"packages with cycles of {of}: {len(cycles)}")


_TRACED = """
import sys
from titan_core.cli.main import main

VALUE = 0.01234567
step, value, steps = set(), set(), []


def has(one, depth):
    if isinstance(one, dict) and depth:
        return len(one) < 100 and any(has(member, depth - 1) for member in list(one.values()))
    if depth and type(one).__module__.startswith("titan") and hasattr(one, "__dict__"):
        return any(has(member, depth - 1) for member in list(vars(one).values()))
    return str(VALUE) in one if isinstance(one, str) and len(one) < 200 else isinstance(one, float) and one == VALUE


def watch(frame, event, result):
    file = frame.f_code.co_filename
    if event not in ("call", "return") or "/packages/titan-" not in file:
        return
    if frame.f_code.co_qualname == "Trainer.step":
        steps.append(event)
    if steps == ["call", "return", "call"]:  # the second of three
        step.add(file)
    if file not in value:
        if any(has(one, 1) for one in [*frame.f_locals.values(), result]):
            value.add(file)


sys.setprofile(watch)
status = main(["train", "llama3_debug", "--training.steps", "3", "--optimizer.weight_decay", str(VALUE)])
sys.setprofile(None)
for what, files in (("STEP", step), ("VALUE", value)):
    for file in files:
        print(what, file.rpartition("/src/")[2])
raise SystemExit(status)
"""


def _print_traces(names: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TRACED]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    for what, sentence in (
        ("STEP", "run code in one step"),
        ("VALUE", "have optimizer.weight_decay in a variable or member"),
    ):
        files = sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{what} "))
        print(f"files that {sentence}: {len(files)}")
        if names:
            print("".join(f"  {file}\n" for file in files), end="")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="run a job, and count the files of a step and of a value")
    parser.add_argument("--rooms", action="store_true", help="list the rooms of each package, and with --trace the files")
    arguments = parser.parse_args()
    _print_sizes(arguments.rooms)
    if arguments.trace:
        _print_traces(arguments.rooms)


if __name__ == "__main__":
    main()
