"""Plugins from files that the user names on the command line (``titan --plugin my_formats.py train ...``).

The command that is given the option hashes each file and passes its path and hash on in the environment, so that ranks, data
workers and child runs load the same code, and refuse a file that has changed in the meantime. No torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from keyword import iskeyword
from pathlib import Path
from types import ModuleType

from titan_core.api import UserError
from titan_core.api._shown import shorten
from titan_core.toolkit.errors import nearest_path
from titan_core.toolkit.files import read_bytes

OPTION = "--plugin"
VARIABLE = "TITAN_PLUGIN_FILES"
"""Environment variable of the processes of a command: its files with their hashes, as JSON."""


@dataclass(frozen=True)
class PluginFile:
    """A file with a plugin's code."""

    path: Path
    """Absolute path."""
    sha256: str
    """SHA-256 of its bytes, in hexadecimal digits."""

    @property
    def name(self) -> str:
        """Name of the module, and of the plugin."""
        return self.path.stem

    @property
    def where(self) -> str:
        """The option that names the file, for error messages."""
        return f"{OPTION} {shorten(str(self.path))}"


_loaded: dict[PluginFile, ModuleType] = {}
"""The modules of this process, each imported once."""


def plugin_files() -> list[PluginFile]:
    """Return the files that this process loads plugins from."""
    return [PluginFile(Path(path), digest) for path, digest in json.loads(os.environ.get(VARIABLE, "[]"))]


def plugin_options() -> list[str]:
    """Return the options with which a command loads the plugins of this process."""
    return [word for file in plugin_files() for word in (OPTION, str(file.path))]


@contextmanager
def using_plugin_files(paths: Sequence[str]) -> Iterator[None]:
    """Load plugins from ``paths`` too, here and in all processes that are started within the context.

    Raises:
        UserError: a file cannot be read, or its name is not one that a module can have.
    """
    if not paths:
        yield
        return
    before = os.environ.get(VARIABLE)
    files = plugin_files()
    for path in paths:
        file = _named(path)
        if file.name in (other.name for other in files):
            raise UserError.one(file.where, f"is the second plugin file named {file.name!r}", "rename one of them")
        files.append(file)
    os.environ[VARIABLE] = json.dumps([(str(file.path), file.sha256) for file in files])
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        for file in set(_loaded).difference(plugin_files()):
            sys.modules.pop(_loaded.pop(file).__name__, None)


def load_plugin_files() -> list[tuple[PluginFile, ModuleType]]:
    """Import the plugin files of this process, and return their modules.

    Raises:
        UserError: a file has changed since the command started, its name is that of another module, or its import fails.
    """
    return [(file, _load(file)) for file in plugin_files()]


def _named(path: str) -> PluginFile:
    where, file = f"{OPTION} {shorten(path)}", Path(path)
    if not file.exists():
        raise UserError.one(where, "no such file", nearest_path(path))
    if not file.is_file():
        raise UserError.one(where, "is not a file", "name a Python file; a plugin with several files is a package")
    if file.suffix != ".py" or not file.stem.isidentifier() or iskeyword(file.stem):
        why = "is not the name of a Python module, such as my_formats.py"
        raise UserError.one(where, why, "rename the file")
    return PluginFile(file.resolve().with_name(file.name), sha256(_read(file, where)).hexdigest())


def _read(file: Path, where: str) -> bytes:
    try:
        return read_bytes(file)
    except OSError as error:
        raise UserError.one(where, f"cannot be read: {error.strerror or error}", "check the path") from None


def _load(file: PluginFile) -> ModuleType:
    if file in _loaded:
        return _loaded[file]
    code = _read(file.path, file.where)
    if sha256(code).hexdigest() != file.sha256:
        raise UserError.one(file.where, "has changed since the command started", "start the command again")
    other = sys.modules.get(file.name) or _found(file.name)
    if other is not None and not _is_at(other, file.path):
        why = f"has the name of another module, {file.name!r}, which it would hide"
        raise UserError.one(file.where, why, "rename the file")
    spec = spec_from_file_location(file.name, file.path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[file.name] = module  # where references and pickles of its classes find it
    try:
        # Exactly the bytes that were hashed: no cache of bytecode, and no second read.
        exec(compile(code, file.path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[file.name]
        why = f"importing it raised {type(error).__name__}: {error}"
        raise UserError.one(file.where, why, "fix the file, or set TITAN_TRACEBACK=1 to see the traceback") from error
    _loaded[file] = module
    return module


def _found(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None


def _is_at(module: ModuleType | ModuleSpec, path: Path) -> bool:
    origin = module.origin if isinstance(module, ModuleSpec) else getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == path.resolve()
