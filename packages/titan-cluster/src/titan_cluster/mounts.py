"""Mounts of a container on Slurm, which sees nothing else of the machines' file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_core.api import UserError
from titan_core.toolkit.text import shorten

_OWN = ("/dev", "/proc", "/sys")
"""Folders that every container has of its own."""
_SEPARATOR = re.compile(r"[,:]")
_FORM = re.compile(r"(/[^,:]+)(:/[^,:]+)?(:[a-z+]+)?")


@dataclass(frozen=True)
class Mounts:
    """The mounts of a container."""

    fixed: tuple[str, ...]
    """``SOURCE:TARGET``, as Slurm takes them."""
    outputs: tuple[str, ...]
    """Folders of the config that the job writes; the job creates them."""
    inputs: tuple[str, ...]
    """Paths of the config that the job mounts if the machine has them."""


def mounts(folder: Path, config: Mapping[str, Any], run: str, requested: Iterable[str]) -> Mounts:
    """Return the mounts for a job.

    Args:
        folder: the working folder.
        config: sections, each of keys and plain values.
        run: the run's directory.
        requested: values of ``--mount``.

    Raises:
        UserError: a path contains a character with which Slurm separates mounts.
    """
    fixed = [f"{_mountable(str(folder))}:{folder}"]
    targets = [str(folder)]
    for text in requested:
        match = _FORM.fullmatch(text)
        if match is None or not text.isprintable():
            why = "must be an absolute path, or two and perhaps flags, with colons between them"
            raise UserError.one(f"--mount {shorten(text)!r}", why, "use for example --mount /datasets:/data:ro")
        source, target, flags = match[1], (match[2] or f":{match[1]}"), match[3] or ""
        fixed.append(f"{source}{target}{flags}")
        targets.append(os.path.normpath(target[1:]))
    seen = _Seen(folder, targets)
    folders = (value for key, value in _values(config) if re.fullmatch(r"(.+_)?folder", key) and value.startswith("/"))
    outputs = [_mountable(path) for value in (run, *folders) for path in seen.new(value)]
    inputs = [path for _, value in _values(config) if seen.is_path(value) for path in seen.new(value)]
    # A text that begins like a path may be none.
    inputs = [_mountable(path) for path in inputs if _SEPARATOR.search(path) is None or os.path.lexists(path)]
    return Mounts(tuple(fixed), tuple(outputs), tuple(inputs))


@dataclass
class _Seen:
    folder: Path
    """Where relative paths begin."""
    targets: list[str]
    """What is mounted already."""

    def is_path(self, value: str) -> bool:
        """Whether ``value`` is a path that may be outside of the folder, and not a word."""
        try:
            return value.startswith(("/", "../")) or self._place(value).exists()
        except (OSError, ValueError):  # a text that no file system allows as a name
            return False

    def new(self, value: str) -> Iterator[str]:
        """Yield the paths that are to be mounted for ``value``: itself, and what it is a symbolic link to."""
        try:
            paths = [os.path.normpath(self._place(value)), os.path.realpath(self._place(value))]
        except (OSError, ValueError):
            return
        for path in paths:
            if path != "/" and not any(Path(path).is_relative_to(target) for target in (*self.targets, *_OWN)):
                self.targets.append(path)
                yield path

    def _place(self, value: str) -> Path:
        """Return the path, or the folder in which a glob begins."""
        return Path(self.folder, re.split(r"(?:^|/)[^/]*[*?\[]", value, maxsplit=1)[0] or ("/" if value[:1] == "/" else "."))


def _values(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a config, each after its key. Those of a list have the key of the list."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _values(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner, key)
    elif isinstance(value, str):
        yield key, value


def _mountable(path: str) -> str:
    """
    Raises:
        UserError: Slurm would read ``path`` as several.
    """
    if _SEPARATOR.search(path):
        raise UserError.one(path, "contains ',' or ':', which Slurm's --container-mounts separates", "use another")
    return path
