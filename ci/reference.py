"""The reference of the documentation site: the contract by chapter and file, as ``_contents.py`` lists it, the hooks and the
libraries, from their docstrings. Names of the contract in code style, on any page, lead to it. An extension of Sphinx."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import titan_core.api
from ci.contract import MADE_BY_TITAN, contents, hook_names, importable_names

NAMES, HOOKS = importable_names(), hook_names()
LIBRARIES = "titan_nn", "titan_testing.suites"
"""What plugins import beside the contract."""
_NAME = re.compile(r"(\w+)((?:\.\w+)*)(?:\(.*\))?")


def reference() -> Iterator[tuple[str, str]]:
    """Yield page -> reStructuredText: the contract by chapter and file, the hooks, and the libraries."""
    described = {"hookspecs"}
    for chapter, files in contents().items():
        stems = [file.rpartition(".")[2] for file in files]
        yield f"{chapter}/index", _page(chapter.capitalize(), [f".. automodule:: titan_core.api.{chapter}"], stems)
        for file, names in files.items():
            module = [] if file in described else [f".. automodule:: titan_core.api.{file}"]
            described.add(file)
            objects = [_directive(name) for name in names]
            yield f"{chapter}/{file.rpartition('.')[2]}", _page(_shortened(names), [*module, *objects], [])
    yield "hooks", _page("Hooks", [".. automodule:: titan_core.api.hookspecs\n   :members: " + ", ".join(HOOKS)], [])
    for library in LIBRARIES:
        modules = sorted(module.name for module in iter_modules(import_module(library).__path__))
        for name in modules:
            text = f".. automodule:: {library}.{name}\n   :members:"
            yield f"{library}/{name}", _page(f"{library}.{name}", [text], [])
        yield f"{library}/index", _page(library, [f".. automodule:: {library}"], modules)
    below = [*(f"{chapter}/index" for chapter in contents()), "hooks", *(f"{library}/index" for library in LIBRARIES)]
    libraries = "Beside the contract: " + ", ".join(f":mod:`{library}`" for library in LIBRARIES) + "."
    version = ".. autodata:: titan_core.api.API_VERSION"
    yield "index", _page("Reference", [".. automodule:: titan_core.api", libraries, version], below)


def _directive(name: str) -> str:
    value, path = getattr(titan_core.api, name), f"titan_core.api.{name}"
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__mro__[1:] if base.__module__.startswith("titan_")]
        options = ["", ":members:", *([":show-inheritance:"] if bases and bases[0] in NAMES else [])]
        if not NAMES.issuperset(bases) and not issubclass(value, Exception):  # a base that the reference does not have
            options.append(":inherited-members: Generic")
        if "Component" in bases:
            options.append(":exclude-members: kind, keys")
        return f".. autoclass:: {path}" + "\n   ".join(options)
    if inspect.isfunction(value):
        return f".. autofunction:: {path}"
    return f".. autodata:: {path}" + ("" if isinstance(value, str | tuple) else "\n   :no-value:")


def _shortened(names: tuple[str, ...]) -> str:
    """Return the title of a page: the names on it, or the first of them."""
    title = ", ".join(names)
    return title if len(title) <= 45 else title[:45].rpartition(",")[0] + " ..."


def _page(title: str, blocks: list[str], below: list[str]) -> str:
    toctree = [".. toctree::\n   :hidden:\n\n   " + "\n   ".join(below)] if below else []
    return "\n\n".join([".. highlight:: python", f"{title}\n{'=' * len(title)}", *blocks, *toctree]) + "\n"


def _link_names(app: Sphinx, document: nodes.document) -> None:
    """Make references of names of the contract in code style."""
    for literal in list(document.findall(nodes.literal)):
        found = _NAME.fullmatch(literal.astext())
        if found is None or isinstance(literal.parent, nodes.reference | nodes.title | addnodes.pending_xref):
            continue
        if found[1] in NAMES:
            target = f"titan_core.api.{found[1]}{found[2]}"
        elif found[1] in HOOKS:
            target = f"titan_core.api.hookspecs.{found[1]}"
        else:
            continue
        reference = addnodes.pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname)
        literal.replace_self(reference)
        reference += literal


def _read_docstring(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    """Read ``Args:`` and ``Raises:``; give a constant the docstring below its assignment, which is in another module."""
    if what in ("module", "class", "function", "method"):
        lines[:] = GoogleDocstring(lines).lines()
    for file, names in (item for files in contents().values() for item in files.items()) if what == "data" else ():
        if name.removeprefix("titan_core.api.") in names:
            described = ModuleAnalyzer.for_module(f"titan_core.api.{file}").find_attr_docs()
            lines[:] = described.get(("", name.rpartition(".")[2]), [""])


def _shorten_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, _: str | None
) -> tuple[str, str] | None:
    """Return the signature of a dataclass without types and options, which its fields have below it. What plugins do not
    construct has none, and neither has a protocol."""
    if not isinstance(value, type):
        return None
    if value.__name__ in MADE_BY_TITAN or signature == "(*args, **kwargs)":
        return "", ""
    if not dataclasses.is_dataclass(value):
        return None
    parameters = inspect.signature(value).parameters.values()
    required = [one.replace(annotation=one.empty) for one in parameters if one.default is one.empty]
    short = str(inspect.Signature(required))
    return (short if len(required) == len(parameters) else f"{short[:-1]}{', ' if required else ''}...)"), ""


def setup(app: Sphinx) -> None:
    """Sphinx calls it: this module is one of its extensions."""
    app.connect("doctree-read", _link_names)
    app.connect("autodoc-process-docstring", _read_docstring)
    app.connect("autodoc-process-signature", _shorten_signature)
