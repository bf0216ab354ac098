"""Files, links, names and hooks that the pages mention exist, examples in Python import what can be imported, and ``titan``
understands the commands and the keys of recipes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import shlex
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import titan_core.api
from ci.contract import importable_names
from titan_core.api import hookspecs
from titan_core.api.config.resolved import Override
from titan_core.api.config.sections import CORE_SECTIONS
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli import main as cli
from titan_core.plugins.discovery import REGISTRATION_HOOKS, discover
from titan_core.toolkit import hookspecs as toolkit_hooks

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "*/*/README.md") for page in ROOT.glob(pattern)
)
FOLDERS = ("packages", "examples", "tests", "docs", "ci", "benchmarks")
FILES = [
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
]
PACKAGES = {path.name for folder in ("packages", "examples") for path in (ROOT / folder).glob("*/src/titan_*")}
SLOTS = {
    name
    for file in (ROOT / "packages").glob("*/src/*/slots.py")
    for name in re.findall(r'name="(titan_\w+\.\w+)"', file.read_text(encoding="utf-8"))
}
HOOKS = {name for module in (hookspecs, toolkit_hooks) for name in vars(module) if name.startswith("titan_")}
CLASSES = {name: value for name in importable_names() if inspect.isclass(value := getattr(titan_core.api, name))}
NOT_OURS = {"random.py", "Dataset.save_to_disk"}
"""A file of a user's, in docs/security.md; a method of Hugging Face's datasets, in docs/data.md."""

KEYS = {
    f"{section.section}.{key}"
    for section in (
        *CORE_SECTIONS,
        *(one.config for plugin in discover().plugins for one in plugin.components if one.config),
    )
    for key in section.model_fields
}
EXAMPLES = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*/src/*/*.py"))
SECTIONS_OF_EXAMPLES = set(re.findall(r'section: ClassVar\[str\] = "(\w+)"', EXAMPLES))
COMMANDS_OF_EXAMPLES = tuple(re.findall(r'Command\(\s*name="([\w ]+)"', EXAMPLES))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans(page: Path) -> set[str]:
    """Return what a page sets as code within a line."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```$", "", text_of(page))
    return set(re.findall(r"`([^`\n]+)`", prose))


def resolves(dotted: str) -> bool:
    """Whether ``dotted`` names a module, or something in one."""
    parts = dotted.split(".")
    found: ModuleType | object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:index]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def has(cls: type, attribute: str) -> bool:
    return hasattr(cls, attribute) or any(attribute in inspect.get_annotations(base) for base in cls.__mro__)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", text_of(page)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_files_and_folders_exist(page: Path) -> None:
    named = {span.rstrip("/") for span in spans(page) if re.fullmatch(r"[\w./-]+\.py|[\w.-]+/[\w./-]+/", span)} - NOT_OURS
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in FILES)} == set()


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text_of(page))
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [target for target, _ in targets if not target.exists()] == []
    assert [(target.name, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)] == []


@each_page
def test_names_and_hooks_exist(page: Path) -> None:
    dotted = set(re.findall(r"\btitan_\w+(?:\.\w+)+(?!\w*[/(])", text_of(page))) - SLOTS
    dotted = {name for name in dotted if not name.endswith((".py", ".whl"))}
    assert {name for name in dotted if not resolves(name)} == set()
    of_the_contract = {name.removeprefix("titan_core.api.") for name in dotted if name.startswith("titan_core.api.")}
    promised = {name for name in of_the_contract if "." not in name}  # others are of a file, as our own packages import them
    assert promised - {"hookspecs"} <= importable_names()

    words = {word for span in spans(page) for word in re.findall(r"^titan_[a-z_]+(?=$|\()", span)}
    assert words - PACKAGES - HOOKS == set()


def test_the_files_that_ask_for_the_simulation_are_listed() -> None:
    page = (ROOT / "docs/architecture/simulation.md").read_text(encoding="utf-8")
    asking = [
        file.relative_to(ROOT).as_posix()
        for file in ROOT.glob("packages/*/src/**/*.py")
        if re.search(r"(?<!def )\b(current_simulation|has_values)\(\)", file.read_text(encoding="utf-8"))
        and file.name != "simulation.py"
    ]
    places = [place for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for place in re.findall("`(.*?)`", row)]
    assert len(asking) == len(places) and all(any(file.endswith(f"/{place}") for file in asking) for place in places)


def test_references_in_docstrings_resolve() -> None:
    referred = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?(titan_\w+(?:\.\w+)+)`")
    sources = list((ROOT / "packages").rglob("src/**/*.py"))
    names = {name for file in sources for name in referred.findall(file.read_text(encoding="utf-8"))}
    assert len(names) > 100
    assert {name for name in names if not (resolves(name) or _is_annotated(name))} == set()


def _is_annotated(dotted: str) -> bool:
    """Whether ``dotted`` names a field of a class, which has no default."""
    of, _, field = dotted.rpartition(".")
    module, _, cls = of.rpartition(".")
    return resolves(of) and has(getattr(importlib.import_module(module), cls), field)


@each_page
def test_attributes_of_classes_exist(page: Path) -> None:
    classes = {**CLASSES, "AssembledJob": AssembledJob}
    named = {
        tuple(found.groups()) for span in spans(page) - NOT_OURS if (found := re.match(r"([A-Z]\w+)\.([a-z_]\w*)", span))
    }
    assert {(cls, name) for cls, name in named if cls in classes and not has(classes[cls], name)} == set()


@each_page
def test_examples_are_python_and_import_names_that_exist(page: Path) -> None:
    for code in re.findall(r"(?ms)^ *```python\n(.*?)^ *```$", text_of(page)):
        for node in ast.walk(ast.parse(textwrap.dedent(code))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titan_"):
                module = importlib.import_module(f"{node.module}")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@each_page
def test_commands_and_their_options_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: set[str] = set()

    def understood(namespace: object, registry: object, overrides: Sequence[Override], *_: object) -> None:
        keys.update(".".join(override.key.split(".")[:2]) for override in overrides)
        raise SystemExit(0)  # in place of running the command

    monkeypatch.setattr(cli, "Invocation", understood)
    blocks = re.findall(r"(?ms)^ *```(?:bash)?\n(.*?)^ *```$", text_of(page))  # in which $ shows an error
    lines = re.findall(r"(?m)^ *(?:[A-Z_]+=\S+ )*(?:uv run )?titan (.+)$", "\n".join(blocks).replace("\\\n", " "))
    for line in [one for one in lines if not one.startswith(COMMANDS_OF_EXAMPLES)]:
        command = re.sub(r"--plugin \S+ | [|>] .*| && .*| \.\.\.", "", line)
        with contextlib.suppress(SystemExit):
            assert cli.main(shlex.split(command, comments=True)) == 0, (line, capsys.readouterr().err)
    assert {key for key in keys - KEYS if key.partition(".")[0] not in SECTIONS_OF_EXAMPLES} == set()


@each_page
def test_keys_of_recipes_exist(page: Path) -> None:
    for code in re.findall(r"(?ms)^ *```toml\n(.*?)^ *```$", text_of(page)):
        recipe = tomllib.loads(textwrap.dedent(code))
        if "project" in recipe or "base" in recipe:  # a pyproject.toml, or a description of a machine
            continue
        stages = recipe.pop("stages", [])
        tables = [recipe, *(stages if isinstance(stages, list) else [stages])]
        keys = {
            f"{name}.{key}"
            for table in tables
            for name, section in table.items()
            if isinstance(section, dict)
            for key in section
        }
        assert keys - KEYS == set()


def test_the_page_about_plugins_lists_each_hook_that_registers() -> None:
    page = text_of(ROOT / "docs/plugins.md")
    assert {hook for hook in REGISTRATION_HOOKS if f"`{hook}`" not in page} == set()


def test_the_reference_lists_the_hooks_of_the_lifecycle_in_the_order_in_which_they_fire() -> None:
    section = text_of(ROOT / "docs/plugins/reference.md").partition("## Hooks in firing order")[2]
    listed = list(dict.fromkeys(re.findall(r"`(titan_\w+)(?:\([\w, ]*\))?`", section)))
    declared = [name for name in vars(hookspecs) if name.startswith("titan_") and name not in REGISTRATION_HOOKS]
    assert listed[: len(declared)] == declared and len(declared) > 10
    assert set(listed[len(declared) :]) <= {name for name in vars(toolkit_hooks) if name.startswith("titan_")}


def test_the_page_about_the_architecture_says_what_each_file_defines() -> None:
    section = text_of(ROOT / "docs/architecture.md").partition("## Where do I find")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.count(" | ") == 2 and "`" in line]
    assert len(rows) > 20
    for _, where, names in rows:
        named = re.findall(r"`([\w/]+\.py)`", where)
        files = [file for file in FILES if file.endswith(tuple(f"/{name}" for name in named))]
        text = "".join(text_of(ROOT / file[1:]) for file in files)
        assert [name for name in re.findall(r"`([\w ]+)`", names) if not re.search(rf"\b{name}\b", text)] == [], where
