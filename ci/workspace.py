"""The packages of this repository, read from their ``pyproject.toml`` files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = "titan-core"
META = "titan-llm"
"""The distribution without files that requires the packages by what they are used for: the root of the workspace."""
KIT = "titan-testing"
"""What all suites use beside the package that they test."""
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
        """The folder of its tests, for example ``tests/models_llama`` for ``titan-models-llama``."""
        return ROOT / "tests" / self.module.removeprefix("titan_")

    @property
    def plugins(self) -> tuple[str, ...]:
        """The names of its plugins, as ``TITAN_DISABLE_PLUGINS`` accepts them."""
        return tuple(self.project.get("entry-points", {}).get("titan.plugins", {}))

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of its optional dependencies."""
        return tuple(self.project.get("optional-dependencies", {}))

    @property
    def requirements(self) -> list[str]:
        """All that it requires, its extras' requirements included."""
        optional = self.project.get("optional-dependencies", {})
        return [*self.project["dependencies"], *(one for extra in optional.values() for one in extra)]

    def requires(self, name: str) -> str | None:
        """Return its declared requirement of package ``name`` (``"torch>=2.11"``); ``None`` if there is none."""
        return next((one for one in self.requirements if requirement_name(one) == name), None)


def requirement_name(requirement: str) -> str:
    """Return the package name in a requirement: ``"torch"`` for ``"torch>=2.11"``."""
    found = _NAME.match(requirement)
    assert found is not None, f"not a requirement: {requirement}"
    return found.group().lower().replace("_", "-")


@cache
def packages() -> dict[str, Package]:
    """Return all packages by name."""
    folders = [file.parent for file in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    return {package.project["name"]: package for package in (Package(folder.name, folder) for folder in folders)}


def distributions() -> dict[str, Package]:
    """Return all that a release can be of: the packages, and the distribution that requires them."""
    return {**packages(), META: Package(META, ROOT)}


def with_dependencies(name: str) -> list[Package]:
    """Return the package ``name`` and its dependencies in the workspace, direct and indirect."""
    everything = packages()
    chosen: dict[str, Package] = {}
    waiting = [name]
    while waiting:
        package = everything[waiting.pop()]
        if package.name not in chosen:
            chosen[package.name] = package
            names = map(requirement_name, package.project["dependencies"])
            waiting += [dependency for dependency in names if dependency in everything]
    return list(chosen.values())


def test_groups(chosen: Sequence[Package]) -> dict[str, list[str]]:
    """Return the requirements of the tests of ``chosen`` by dependency group of the workspace's ``pyproject.toml``."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    names = ("test", *(f"test-{package.name}" for package in chosen))
    return {name: groups[name] for name in names if name in groups}


def declared(chosen: Sequence[Package]) -> list[str]:
    """Return what ``chosen``, their extras and their tests require."""
    requirements = [one for package in chosen for one in package.requirements]
    return [*requirements, *(one for group in test_groups(chosen).values() for one in group)]
