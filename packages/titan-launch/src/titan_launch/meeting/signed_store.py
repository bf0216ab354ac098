"""HMAC-signed JSON records of launchers in the store of their rendezvous.

Anybody who reaches its port can read and write torch's store. So each record has an HMAC of its name, its value and the ID
of the job, and nothing that is read there is unpickled. Free of torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from titan_core.api import UserError
from titan_core.toolkit.files import open_file
from titan_core.toolkit.launching import JOB_KEY
from titan_core.toolkit.text import shorten

LEAST_CHARACTERS = 32
"""Of a key: with half a byte in each character, 128 bits."""
MAKE_KEY = f"export {JOB_KEY}=$(openssl rand -hex 32)"
_SHARE = "give every machine of the job the same one, in its environment or by --job-key-file FILE (mode 0600)"
_ABSENT = b"titan: no such record"
"""No record has this text."""


class Forged(Exception):
    """A record was not written with this job's key, or for another place."""


def job_key(file: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the key that the machines of a job share.

    Args:
        file: ``--job-key-file``; :data:`JOB_KEY` otherwise.

    Raises:
        UserError: there is none, it is too short, or other users can read the file.
    """
    if file is None:
        where, text = JOB_KEY, environment.get(JOB_KEY, "")
        if not text:
            why = "is not set: launchers on several machines accept orders only from those that share a key"
            raise UserError.one(where, why, f"{MAKE_KEY}, and {_SHARE}")
    else:
        where = f"--job-key-file {shorten(file)}"
        text = _read(Path(file), where)
    key = text.strip().encode()
    if len(key) < LEAST_CHARACTERS:
        why = f"has {len(key)} characters, but a key needs {LEAST_CHARACTERS}"
        raise UserError.one(where, why, f"make one by `openssl rand -hex 32`, and {_SHARE}")
    return key


def _read(path: Path, where: str) -> str:
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno())
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                why = f"other users may read or change it (mode {stat.S_IMODE(found.st_mode):04o})"
                raise UserError.one(where, why, "make a new key, and protect its file by `chmod 600`")
            return file.read(4096).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UserError.one(where, why, "name the file that contains the key") from None


class Store(Protocol):
    """The methods of torch's ``TCPStore`` that are used here. Its values are bytes."""

    def compare_set(self, key: str, expected_value: bytes, desired_value: bytes) -> bytes:
        """Replace a value unless another client was faster; return the new one."""

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""


class SignedStore:
    """The records of one job in a store."""

    def __init__(self, store: Store, key: bytes, run_id: str) -> None:
        """
        Args:
            key: what the machines of the job share.
            run_id: the name of the job in the store.
        """
        self._store, self._key, self._run_id = store, key, run_id

    def text(self, name: str) -> bytes | None:
        """Return a record as it was written; ``None`` if there is none. Does not wait for it."""
        found = self._store.compare_set(self.place(name), _ABSENT, _ABSENT)
        return None if found == _ABSENT else found

    def read(self, name: str) -> Any:
        """Return the value of a record; ``None`` if there is none, or it is forged."""
        text = self.text(name)
        try:
            return None if text is None else self.opened(name, text)
        except Forged:
            return None

    def write(self, name: str, value: Any) -> None:
        """Write a record."""
        self._store.set(self.place(name), self.sealed(name, value))

    def replace(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Write the text of a record unless it has changed since; return whether it did.

        Args:
            before: what :meth:`text` returned.
        """
        return self._store.compare_set(self.place(name), before or b"", after) == after

    def place(self, name: str) -> str:
        """Return the key of a record in the store."""
        return f"titan/{self._run_id}/{name}"

    def sealed(self, name: str, value: Any) -> bytes:
        """Return the text of a record."""
        text = json.dumps(value, separators=(",", ":")).encode()
        return self._code(name, text) + b" " + text

    def opened(self, name: str, sealed: bytes) -> Any:
        """Return the value of a record.

        Raises:
            Forged: it was written with another key, for another job, or under another name.
        """
        code, _, text = sealed.partition(b" ")
        if not hmac.compare_digest(code, self._code(name, text)):
            raise Forged
        return json.loads(text)

    def _code(self, name: str, text: bytes) -> bytes:
        signed = json.dumps([self._run_id, name]).encode() + text
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()
