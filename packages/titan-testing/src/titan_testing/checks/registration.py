"""Checks of a plugin as it is installed: its metadata, its module, and the code that its components refer to."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.requirements import Requirement

from titan_core.api import API_VERSION, Component, Problem, Ref, UserError
from titan_core.plugins.discovery import Plugin
from titan_core.toolkit.fields import field_docs
from titan_core.toolkit.processes import python

_HEAVY = ("torch", "transformers", "datasets")


def check_metadata(plugin: Plugin) -> str:
    """Check that the distribution can be published: it bounds titan-core, and has a summary, a license and a README."""
    try:
        metadata = importlib_metadata.metadata(plugin.distribution)
        requirements = importlib_metadata.requires(plugin.distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return "a file, no distribution"
    where = f"pyproject.toml of {plugin.distribution}"
    bounds = [one.specifier for one in map(Requirement, requirements) if one.name == "titan-core"]
    problems = []
    if not bounds:
        problems.append(Problem(where, "does not require titan-core", 'add "titan-core>=0.1,<0.2" to its dependencies'))
    elif not any(bound.operator in ("<", "<=", "==", "~=") for bound in bounds[0]):
        why = f"requires titan-core{bounds[0]}, without an upper bound"
        problems.append(Problem(where, why, "a later minor version may change what it imports: bound it, as in <0.2"))
    for name, key in (("Summary", "description"), ("Description", "readme")):
        if not metadata.get(name):
            problems.append(
                Problem(where, f"has no {key}, or an empty one", f"set {key} in its [project], to a text or file")
            )
    if not metadata.get("License-Expression") and not metadata.get("License"):
        problems.append(Problem(where, "has no license", 'add license, for example "BSD-3-Clause"'))
    if problems:
        raise UserError(*problems)
    return f"titan-core{bounds[0]}, contract {'.'.join(map(str, plugin.module.api))} of {'.'.join(map(str, API_VERSION))}"


def check_import(plugin: Plugin) -> str:
    """Check that the plugin's module imports nothing heavy: Titan imports it at every start."""
    module = plugin.module.__name__
    code = f"import {module}; print(*[name for name in {_HEAVY!r} if name in sys.modules])"
    # The folder of a plugin that is a file is on no path.
    file = plugin.module.__file__
    places = [str(Path(file).parent)] if file is not None and "." not in module else []
    code = f"import sys; sys.path += {places!r}; {code}"
    done = subprocess.run(python("-c", code), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it failed without an error"]
        raise UserError.one(module, f"cannot be imported by itself: {lines[-1]}", "import what it needs in it")
    if heavy := done.stdout.split():
        fix = "import it in the functions that Refs name, and not in plugin.py"
        raise UserError.one(module, f"imports {', '.join(heavy)}, which every start of Titan would wait for", fix)
    return f"imports none of {', '.join(_HEAVY)}"


def check_references(component: Component) -> str:
    """Check that every function that the component names can be imported."""
    found = list(_references(component))
    for reference in found:
        reference.load()
    return f"{len(found)} imported" if found else "none"


def check_summary(component: Component) -> str:
    """Check that lists can show the component in one line."""
    where = f"{component.kind} {component.name!r}"
    if not component.summary.strip() or "\n" in component.summary:
        raise UserError.one(where, "needs a summary of one line", "describe it in a few words")
    section = component.config
    documented = field_docs(section) if section is not None else {}
    keys = section.model_fields if section is not None else {}
    if undocumented := [f"{section.section}.{key}" for key in keys if section is not None and not documented.get(key)]:
        fix = "write a docstring under each field: --help and errors show it"
        raise UserError.one(where, f"does not document {', '.join(undocumented)}", fix)
    return component.summary


def _references(value: Any) -> Iterator[Ref[Callable[..., Any]]]:
    """Yield all references in a component, those in its parts included."""
    if isinstance(value, Ref):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _references(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _references(one)
