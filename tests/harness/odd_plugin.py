"""Plugins whose code fails, and the owner that errors name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.distributions import entry_points_in, write_distribution
from titan_core.plugins.discovery import discover
from titan_core.plugins.guard import Origin
from titan_core.plugins.registry import Components

INSTALLED = discover()
ORIGIN = Origin("odd", "titan-odd", "1.2", "transform 'odd'")

HEAD = """
from typing import Any, ClassVar
from pydantic import BaseModel, Field, field_validator
from titan_core.api import *
api = (1, 0)
def raises(*a): raise ZeroDivisionError("odd")
def leaves(*a): import sys; sys.exit(4)
def refuses(*a): raise UserError.one("odd", "not today")
def yields(*a):
    yield Problem("odd", "first")
    raise KeyError("late")
def nothing(*a): return None
def yes(*a): return True
def three(*a): return 3
def text(*a): return "all is well"
def words(*a): return ["all is well"]
number = 3
class Args(BaseModel):
    dim: int = 8
class Own(Section):
    section: ClassVar[str] = "odd_section"
    key: int = 1
"""


def registry_with(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch, name: str = "odd") -> Components:
    """Return the registry of all installed plugins and of a plugin with ``source``."""
    write_distribution(folder, name, HEAD + source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = discover(entry_points_in(folder))
    return Components(
        type(found)(INSTALLED.plugins + found.plugins, INSTALLED.broken + found.broken, INSTALLED.disabled + found.disabled)
    )


TRANSFORM = "Transform(name='odd', summary='', phase=Phase.DATA, apply=Ref('odd:raises'), active={active}{more})"
