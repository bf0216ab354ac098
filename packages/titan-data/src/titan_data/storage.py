"""Paths of datasets on this machine and in object stores: ``s3://``, ``gs://``, ``hf://``, ``https://``.

fsspec reads what is remote, and ``universal-pathlib`` gives it the interface of :class:`pathlib.Path`, as far as titan-data
uses that. Credentials come from the environment, as the tools of each store define it, and never from a path.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

from titan_core.api import CorruptRecord, DatasetContext, Problem, UserError
from titan_core.api.config.secrets import redact_text
from titan_core.toolkit.cache_folder import cache_folder, cached_file
from titan_core.toolkit.files import LOCALE_FIX, encoding_flaw

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*)://")
_STORES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # What implements the store, and its options. Without a cache, a file transfers the bytes that are read and no others.
    "s3": ("s3", {"default_cache_type": "none", "default_fill_cache": False}),
    "gs": ("gs", {"default_cache_type": "none"}),
    "hf": ("", {"block_size": 0}),
    "http": ("", {"block_size": 0, "cache_type": "none"}),
    "https": ("", {"block_size": 0, "cache_type": "none"}),
}
_LIBRARIES: Final = {"aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "httpx", "huggingface_hub", "requests"}
_COPIES: Final = 64 << 30
"""Bytes of copies of remote indexes that this machine keeps."""


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` names something in an object store."""
    return (isinstance(path, str) and bool(_SCHEME.match(path))) or hasattr(path, "fs")


def located(path: str, where: str) -> Path:
    """Return the file or folder that ``path`` names, here or in an object store.

    Args:
        where: the setting that names it, for errors.

    Raises:
        UserError: the store is not known, its package is not installed, or the path contains credentials, or characters that
            no file has under the locale.
    """
    found = _SCHEME.match(path)
    if found is None:
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            why = f"{path!a} has characters that the encoding of the locale, {sys.getfilesystemencoding()}, lacks"
            raise UserError.one(where, why, LOCALE_FIX) from None
        return Path(path).expanduser()
    scheme = found.group(1).lower()
    if scheme not in _STORES:
        known = ", ".join(f"{one}://" for one in _STORES)
        raise UserError.one(where, f"{scheme}:// is no store that titan-data reads", f"name a path, or one of {known}")
    rest = path[found.end() :]
    if "@" in rest.partition("/")[0]:
        fix = "remove them, and set them in the environment (AWS_ACCESS_KEY_ID, HF_TOKEN ...)"
        raise UserError.one(where, "the path contains credentials, which logs and checkpoints would keep", fix)
    if scheme != "hf" and not rest.strip("/"):
        raise UserError.one(where, f"{path!r} names no file or folder", f"write {scheme}://BUCKET/PATH")
    from upath import UPath

    extra, options = _STORES[scheme]
    try:
        remote = UPath(f"{scheme}://{rest}", **options)
        remote.fs  # noqa: B018  imports the package
    except ImportError:
        why, fix = f"{scheme}:// needs a package that is not installed", f"install titan-data[{extra}]"
        raise UserError.one(where, why, fix) from None
    return cast(Path, remote)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of the libraries that talk to a store, which have types of their own, into ``OSError``.

    Raises:
        OSError: the store cannot be reached, or refuses.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:  # all that a store says of a file's name and expired credentials
            raise PermissionError(f"{path}: the store refuses the request; have the credentials expired?") from error
        raise
    except Exception as error:
        origins = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if origins.isdisjoint(_LIBRARIES):
            raise
        raise OSError(f"{path}: {type(error).__name__}: {redact_text(str(error))}") from error


def unreadable(context: DatasetContext[Any], error: OSError) -> Problem:
    """Return the problem of a dataset whose files cannot be read."""
    why = f"cannot be read: {error.strerror or error}"
    if is_remote(context.path or ""):
        return Problem(context.where, why, "check the address, the network, and the credentials in the environment")
    return Problem(context.where, why, "check its permissions")


def problems(context: DatasetContext[Any], check: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """Return what ``check``, which reads the dataset's files, returns, or the problem that it raises."""
    try:
        with reading(context.path or ""):
            return [*check()]
    except CorruptRecord as error:
        return [Problem(error.place, error.why, error.fix)]
    except UserError as error:
        return list(error.problems)
    except OSError as error:
        return [unreadable(context, error)]


def kind_of(path: Path) -> str | None:
    """Return whether ``path`` is a "file" or a "folder"; ``None`` if there is nothing.

    Raises:
        OSError: the store cannot be reached, or refuses.
    """
    if not is_remote(path):
        return "file" if path.is_file() else "folder" if path.is_dir() else None
    remote: Any = path
    with reading(path):
        try:
            return "file" if remote.fs.info(remote.path)["type"] == "file" else "folder"
        except FileNotFoundError:
            return None


def files_below(folder: Path) -> list[Path]:
    """Return all files in ``folder`` and its folders: of a store, with one listing."""
    if not is_remote(folder):
        return [file for file in folder.rglob("*") if file.is_file()]
    remote: Any = folder
    with reading(folder):
        return [_sibling(remote, name) for name in remote.fs.find(remote.path)]


def matching(pattern: Path) -> list[Path]:
    """Return the files that a glob names."""
    if not is_remote(pattern):
        fixed = fixed_part(pattern)
        found = _found(os.path.join(glob.escape(str(fixed)), pattern.relative_to(fixed)))
        return [file for file in map(Path, sorted(found)) if file.is_file()]
    remote: Any = pattern
    with reading(pattern):
        found = remote.fs.glob(remote.path, detail=True)
        return [_sibling(remote, name) for name, about in found.items() if about["type"] == "file"]


def require_unicode(files: Iterable[Path]) -> None:
    """
    Raises:
        UserError: the name of a file is not valid Unicode, so that no log or checkpoint can contain it.
    """
    for name in map(str, files):
        if flaw := encoding_flaw(name):
            shown = os.fsencode(name).decode(errors="backslashreplace")
            raise UserError.one(f"file {shown!a}", f"its name cannot be read: {flaw[0]}", flaw[1])


def fixed_part(pattern: Path) -> Path:
    """Return the folder that contains all matches of a glob. Folders that exist are meant, even if their names look like
    globs."""
    here = not is_remote(pattern)
    return next(one for one in pattern.parents if not glob.has_magic(str(one)) or (here and one.is_dir()))


def nothing_at(path: Path) -> str:
    """Return why there are no files at ``path``."""
    if not glob.has_magic(str(path)):
        return "no such file"
    bracket = ", in which [ begins a set of characters ([[] is the bracket itself)" if "[" in str(path) else ""
    return f"no such file, and none matches it as a pattern{bracket}"


def _found(pattern: str) -> set[str]:
    """Return what :func:`glob.glob` finds recursively, but in each folder once: links may lead back to a folder above."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    at = parts.index("**")
    rest = os.sep.join(parts[at + 1 :]) or "*"
    found: set[str] = set()
    for folder in _folders(glob.glob(os.sep.join(parts[:at])) if at else ["."]):
        found |= _found(os.path.join(glob.escape(folder), rest))
    return found


def _folders(roots: Iterable[str]) -> Iterator[str]:
    """Yield each folder in ``roots``, and all below, once: those that links lead to last."""
    seen: set[tuple[int, int]] = set()
    waiting = deque(roots)
    while waiting:
        folder = waiting.popleft()
        with suppress(OSError):  # no folder, or not readable
            status = os.stat(folder)
            if (key := (status.st_dev, status.st_ino)) in seen:
                continue
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
            seen.add(key)
            yield folder
            waiting.extendleft(entry.path for entry in entries if not entry.is_symlink())
            waiting.extend(entry.path for entry in entries if entry.is_symlink())


def _sibling(remote: Any, name: str) -> Path:
    return cast(Path, type(remote)(remote.fs.unstrip_protocol(name), **remote.storage_options))


def beside(file: Path, ending: str) -> Path:
    """Return the path of the file whose name is that of ``file`` with ``ending`` behind it."""
    return file.with_name(file.name + ending)


def version(file: Path) -> str:
    """Return what the store says of the contents of a remote file: with other contents, it says something else.

    Raises:
        OSError: the store cannot be reached, or refuses.
    """
    remote: Any = file
    with reading(file):
        about = remote.fs.info(remote.path)
    keys = ("size", "ETag", "etag", "LastModified", "mtime", "sha256")
    return "\n".join([str(file), *(str(about.get(key)) for key in keys)])


def local(file: Path) -> Path:
    """Return ``file`` itself, or a copy in the cache of this machine. For indexes, from which each document needs few bytes.

    Raises:
        OSError: it cannot be fetched, or the cache cannot be written.
    """
    if not is_remote(file):
        return file
    remote: Any = file
    with reading(file):
        name = hashlib.sha256(version(file).encode()).hexdigest()[:32]
        return cached_file(cache_folder("remote"), name, lambda part: remote.fs.get_file(remote.path, str(part)), _COPIES)
