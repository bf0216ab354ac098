"""A rendered file: its scripts, whose values no shell interprets; its YAML, which every parser reads alike; the exit
statuses that it tells apart; and what becomes of it."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from titan_core.api import UserError
from titan_core.toolkit.errors import (
    EXIT_BAD_DEVICE,
    EXIT_DATA_ENDED,
    EXIT_INTERRUPTED,
    EXIT_NUMERICS,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
)
from titan_core.toolkit.text import say

PREEMPTED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)
"""Exit statuses (see docs/failures.md) of a job that had to stop, and saved a checkpoint first if it had begun to train:
always worth another try."""
FINAL = (EXIT_USER_ERROR, EXIT_NUMERICS, EXIT_DATA_ENDED, EXIT_BAD_DEVICE, EXIT_INTERRUPTED)
"""Exit statuses after which another try would end alike, or is not wanted."""

Value = str | int | Iterable[str]
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Booleans of YAML 1.1. Go's parsers, which read Kubernetes' files, know more of them than PyYAML."""
_BREAKS = re.compile("[\x85\u2028\u2029\ufeff]")
"""Ends a line in YAML 1.1 only, or is dropped. PyYAML writes it raw into a block, where parsers differ in what follows."""


def script(values: Mapping[str, Value], *bodies: str) -> str:
    """Return the assignments of ``values``, and then scripts of this package that read them.

    Args:
        values: by name; a list becomes an array.
        bodies: file names of the scripts.
    """
    # Shellcheck warns of values that look like expansions, escapes or mistyped quotes, and are none.
    head = [
        "# shellcheck disable=SC1003,SC1110,SC1111,SC1112,SC2016",
        *(_assignment(name, value) for name, value in values.items()),
    ]
    return "\n".join([*head, "", script_text(*bodies)])


def script_text(*names: str) -> str:
    """Return the text of a script of this package, or of several as one."""
    folder = files("titan_cluster").joinpath("scripts")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _assignment(name: str, value: Value) -> str:
    if isinstance(value, str | int):
        return f"{name}={shlex.quote(str(value))}"
    items = [f"    {shlex.quote(item)}" for item in value]
    return "\n".join([f"{name}=(", *items, ")"]) if items else f"{name}=()"


class _Text(str):
    """A value, as opposed to a key."""

    __slots__ = ()


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return ``documents`` as YAML. Text is quoted unless it is a plain word, and stands in blocks if it has several lines.

    Args:
        documents: of plain values.
    """
    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(_Text, _represent)
    plain = [_marked(document) for document in documents]
    text: str = yaml.dump_all(plain, Dumper=dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item) for item in value]
    return _Text(value) if isinstance(value, str) else value


def _represent(dumper: Any, text: _Text) -> Any:
    # PyYAML quotes text with other control characters, which no block can hold.
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    block = text.endswith("\n") and text.strip() != "" and _BREAKS.search(text) is None
    style = None if plain else "|" if block else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)


def require_program(program: str, what: str) -> None:
    """
    Raises:
        UserError: ``program``, the client of ``what``, is not installed.
    """
    if shutil.which(program) is None:
        fix = f"run this where {what} is set up, or write a file with --output and submit it there"
        raise UserError.one("--submit", f"{program} is not on the PATH", fix)


def write(text: str, given: argparse.Namespace, warning: str) -> None:
    """Write ``text`` to ``--output``; print it if there is none and the job is not submitted.

    Args:
        warning: what the user should know about the job, if anything.

    Raises:
        UserError: the file exists or cannot be written.
    """
    file: Path | None = given.output
    if warning:
        say(f"titan: warning: {warning}", file=sys.stderr)
    if file is None:
        if not given.submit:
            print(text, end="")
        return
    try:
        with file.open("w" if given.force else "x", encoding="utf-8", newline="") as opened:
            opened.write(text)
    except FileExistsError:
        raise UserError.one(str(file), "exists already", "add --force to overwrite it, or name another file") from None
    except OSError as error:
        raise UserError.one(str(file), f"cannot be written: {error.strerror or error}", "name another file") from None


def submit(command: Sequence[str], text: str | None, pattern: str, environment: Mapping[str, str] | None = None) -> str:
    """Run ``command``, show it and its output, and return the job that it names.

    Args:
        text: its standard input.
        pattern: finds the name of the job in the output, as group 1.
        environment: of the command (default: that of this process).

    Raises:
        UserError: the command fails.
    """
    status, output = run_shown(command, text, environment)
    if status != 0:
        raise failure(command, status)
    found = re.search(pattern, output)
    return found[1] if found else ""


def run_shown(command: Sequence[str], text: str | None, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run ``command``, show it and its output, and return its exit status and output.

    Args:
        text: its standard input.
        environment: of the command (default: that of this process).
    """
    say(f"titan: running: {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, input=text, stdin=subprocess.DEVNULL if text is None else None, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="backslashreplace", check=False, env=environment,
    )  # fmt: skip
    say(done.stdout, end="" if done.stdout.endswith("\n") else "\n", file=sys.stderr, flush=True)
    return done.returncode, done.stdout


def failure(command: Sequence[str], status: int) -> UserError:
    """Return the error of a command whose output was shown."""
    return UserError.one(command[0], f"failed with status {status}", "fix what its output above says")
