"""Writes the index of the components that each package provides. titan-completion's wheel contains it as metadata, so that
errors can name the package to install::

    uv run python -m ci.provides
"""

from __future__ import annotations

import argparse
import json
import re

from ci.workspace import CORE, ROOT, packages
from titan_core.api import Command, Dataset, LRSchedule, Model, Objective, Optimizer, Recipe, Tokenizer, Transform
from titan_core.api.config.sections import CORE_SECTIONS
from titan_core.plugins.discovery import Plugin, discover
from titan_core.toolkit.launching import Launcher

CHOSEN_BY_NAME = (Command, Dataset, LRSchedule, Model, Objective, Optimizer, Recipe, Tokenizer)
"""Kinds of components that a config or a command line selects by name. Keys select all others."""
HOLDER = "titan-completion"
FILE = ROOT / "packages" / HOLDER / "provides.json"


def provided() -> dict[str, dict[str, str]]:
    """Return the providing package by kind and name: sections, keys that packages add to core sections or implement,
    components, and launcher options."""
    index: dict[str, dict[str, str]] = {}
    for plugin in discover().plugins:
        if plugin.distribution in packages() and plugin.distribution != CORE:
            for kind, name in provided_by(plugin):
                index.setdefault(kind, {})[name] = plugin.distribution
    return {kind: dict(sorted(names.items())) for kind, names in sorted(index.items())}


def provided_by(plugin: Plugin) -> set[tuple[str, str]]:
    """Return the (kind, name) pairs of a plugin that a config or a command line may use."""
    core = {cls.section for cls in CORE_SECTIONS}
    found: set[tuple[str, str]] = set()
    for component in plugin.components:
        section = component.config
        if isinstance(component, Transform):
            found |= {("key", key) for key in component.serves}
        if isinstance(component, Launcher):
            found |= {("option", option) for option in _options_of(component)}
        if isinstance(component, CHOSEN_BY_NAME):
            found.add((component.kind, component.name))
        if section is not None and section.section in core:
            found |= {("key", f"{section.section}.{key}") for key in section.model_fields}
        elif section is not None:
            found.add(("section", section.section))
    return found


def _options_of(launcher: Launcher) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    launcher.arguments.load()(parser)
    return re.findall(r"--[\w-]+", parser.format_usage())


def render() -> str:
    """Return the contents of the file."""
    return json.dumps(provided(), indent=2) + "\n"


def main() -> None:
    """Write the file."""
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
