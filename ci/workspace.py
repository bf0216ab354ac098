"""The packages of this repository, as their own ``pyproject.toml`` describe them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = "titan-core"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Package:
    """A package of the workspace."""

    name: str
    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """The ``[project]`` table."""
        project: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return project

    @property
    def module(self) -> str:
        """The name of its import package."""
        return self.name.replace("-", "_")

    @property
    def suite(self) -> Path:
        """The folder of its tests: those of ``titan-models-llama`` are in ``tests/models_llama``."""
        return ROOT / "tests" / self.module.removeprefix("titan_")

    @property
    def plugins(self) -> tuple[str, ...]:
        """The names of its plugins: what ``TITAN_DISABLE_PLUGINS`` takes."""
        return tuple(self.project.get("entry-points", {}).get("titan.plugins", {}))

    @property
    def extras(self) -> tuple[str, ...]:
        """Its optional dependencies' names."""
        return tuple(self.project.get("optional-dependencies", {}))

    def requires(self, name: str) -> str | None:
        """How it declares its dependency ``name`` (``"torch>=2.11"``), or ``None``."""
        return next((one for one in self.project["dependencies"] if requirement_name(one) == name), None)


def requirement_name(requirement: str) -> str:
    """``"torch"`` for ``"torch>=2.11"``."""
    found = _NAME.match(requirement)
    assert found is not None, f"not a requirement: {requirement}"
    return found.group().lower().replace("_", "-")


def packages() -> dict[str, Package]:
    """All packages by name."""
    folders = [file.parent for file in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    return {package.project["name"]: package for package in (Package(folder.name, folder) for folder in folders)}


def with_dependencies(name: str) -> list[Package]:
    """The package ``name`` and those of the workspace that it declares, and that these declare."""
    everything = packages()
    chosen: dict[str, Package] = {}
    waiting = [name]
    while waiting:
        package = everything[waiting.pop()]
        if package.name not in chosen:
            chosen[package.name] = package
            waiting += [one for one in map(requirement_name, package.project["dependencies"]) if one in everything]
    return list(chosen.values())
