"""Reads the description of a machine, by name or from a file. Free of torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_core.api import Problem, UserError
from titan_core.api.config.toml import BadToml, parse_toml
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.files import read_text
from titan_core.toolkit.text import shorten
from titan_simulate.hardware.machine import Machine

DEVICES = Path(__file__).parent / "devices"


def names() -> list[str]:
    """Return the names of the machines that come with Titan."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def read_machine(name_or_file: str) -> Machine:
    """Return a machine that comes with Titan, or the one that a TOML file describes.

    A file may begin with ``base = "NAME"``, and then needs only the keys that differ.

    Raises:
        UserError: there is no such machine or file, or the file is not a description of a machine.
    """
    if name_or_file in names():
        return _validated(DEVICES / f"{name_or_file}.toml", name_or_file)
    path = Path(name_or_file)
    if path.suffix == ".toml" or "/" in name_or_file:
        return _validated(path, name_or_file)
    raise UserError.one(
        f"--device {shorten(name_or_file)}",
        "no machine has this name",
        f"use one of {', '.join(names())}, or the path of a .toml file",
    )


def _validated(path: Path, name: str) -> Machine:
    values = _read(path, name)
    base = values.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            fix = f"name one of {', '.join(names())}"
            raise UserError.one(f"{path}: base = {shorten(repr(base))}", "should be the name of a machine, a string", fix)
        if base not in names():
            raise UserError.one(f"{path}: base", f"no machine is called {shorten(base)!r}", nearest(str(base), names()))
        values = _merged(_read(DEVICES / f"{base}.toml", base), values)
    try:
        return Machine.model_validate(values)
    except ValidationError as error:
        raise UserError(*(_problem(path, entry) for entry in error.errors(include_url=False))) from None


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        return parse_toml(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise UserError.one(f"--device {shorten(name)}", f"cannot read {path}: {why}", _fix()) from None
    except BadToml as error:
        where = f"{path}:{error.line}" if error.line is not None else str(path)
        raise UserError.one(where, str(error), "correct the file") from None


def _fix() -> str:
    return f"name a .toml file or one of {', '.join(names())}"


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


_KEYS = " (python -m pydoc titan_simulate.hardware.machine lists the keys)"


def _problem(path: Path, entry: Mapping[str, Any]) -> Problem:
    key = ".".join(map(str, entry["loc"]))
    where = f"{path}: {key}" if key else str(path)
    if entry["type"] == "extra_forbidden":
        return Problem(where, "unknown key", f"delete it, or correct its spelling{_KEYS}")
    if entry["type"] == "missing":
        return Problem(where, "is required", 'add the key, or begin the file with base = "h100" to change only some figures')
    if entry["type"] in ("model_type", "dict_type"):
        return Problem(where, "should be a table", f"write [{key}] and its keys below it")
    reason = str(entry["msg"]).removeprefix("Value error, ")
    value = "" if isinstance(entry["input"], dict) else f" = {shorten(repr(entry['input']))}"
    return Problem(f"{where}{value}", reason[:1].lower() + reason[1:], f"correct the value{_KEYS}")


def machine_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, whose value :func:`read_machine` takes."""
    parser.add_argument(
        "--device", default="h100", metavar="NAME|FILE",
        help=f"the machine: {', '.join(names())}, or a TOML file (default: h100)",
    )  # fmt: skip
