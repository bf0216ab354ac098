"""A client of a rendezvous that does not have the key of the job."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not exported to type checkers

from titan_launch.meeting.handler import State
from titan_launch.meeting.signed_store import SignedStore


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


class Stranger:
    """A client of the store without the key, which has read what is in it since the start of the job."""

    def __init__(self, endpoint: str, folder: Path, run_id: str = "test") -> None:
        host, port = endpoint.split(":")
        self._run_id = run_id
        self.store, self.proof = TCPStore(host, int(port), wait_for_workers=False), folder / "code-has-run"
        self._old: list[bytes] = []

    def listens(self) -> None:
        """Remember the current state."""
        self._old.append(self.state())

    def state(self) -> bytes:
        """Return the current state."""
        return bytes(self.store.get(f"titan/{self._run_id}/state"))

    def states(self) -> dict[str, bytes]:
        """Return forged states."""
        payload = base64.b64encode(pickle.dumps(Touch(self.proof)))
        known = self.state().partition(b" ")[2]
        ended = State("other", sequence=10**9, closed=True).to_json()
        return {
            "a pickle": payload,
            "another key": SignedStore(self.store, b"another key, also of 32 characters", self._run_id).sealed(
                "state", ended
            ),
            "no signature": known.replace(b'"closed":false', b'"closed":true'),
            "a wrong one": b"0" * 64 + b" " + known,
            "nothing": b"",
            "no text": b"\x80",
            **{f"old state {number}": text for number, text in enumerate(self._old)},
        }

    def forge(self, text: bytes) -> None:
        """Write a state, for torch's own rendezvous too."""
        for key in (f"titan/{self._run_id}/state", f"torch.rendezvous.{self._run_id}"):
            self.store.set(key, text)
