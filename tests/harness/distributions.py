"""Fake distributions with real metadata on disk, which plugin discovery treats like third-party packages."""

from __future__ import annotations

import os
from pathlib import Path

import importlib_metadata

from titan_core.plugins.discovery import GROUP


def write_distribution(
    folder: Path, name: str, source: str, *, plugin: str | None = None, version: str = "1.0", module: str | None = None
) -> Path:
    """Write a distribution ``name`` with one module of contents ``source`` and an entry point ``plugin`` for it."""
    module = module or name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{plugin or module} = {module}\n")
    return folder


def entry_points_in(folder: Path) -> list[importlib_metadata.EntryPoint]:
    """Return the plugin entry points of all distributions in ``folder``."""
    return [
        point
        for distribution in importlib_metadata.distributions(path=[str(folder)])
        for point in distribution.entry_points
        if point.group == GROUP
    ]


def python_path(folder: Path | str) -> str:
    """Return the PYTHONPATH of a process that tests start and that also finds the distributions in ``folder``."""
    return os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
