"""Reading the next document in spite of what can go wrong: transient errors are tried again, corrupt records reported."""

from __future__ import annotations

import logging
import threading

from titan_core.api.dataset import CorruptRecord, Document, DocumentShard, ReadPolicy
from titan_core.api.errors import UserError

log = logging.getLogger(__name__)

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
_TOLD = 20
LONGEST_WAIT = 3600.0
"""Seconds between two tries at most, however often the wait was doubled."""


class DocumentReader:
    """Reads documents from shards, and counts what it had to leave out."""

    def __init__(self, policy: ReadPolicy, name: str) -> None:
        self._policy, self._name = policy, name
        self.corrupt = 0
        """Corrupt records that were skipped."""
        self.empty = 0
        """Documents without a token of their own that were left out."""
        self.stopped = threading.Event()
        """Set where nobody waits for the data any more."""

    def next(self, shard: DocumentShard) -> Document | None:
        """The next document of ``shard``, ``None`` at its end.

        Raises:
            UserError: a corrupt record that is not to be skipped, or a source that stays unreadable.
        """
        attempt = 0
        while True:
            before = shard.state_dict()
            try:
                return next(shard, None)
            except CorruptRecord as error:
                if self._policy.on_corrupt == "stop":
                    fix = f'{error.fix}, or leave such records out with data.on_corrupt = "skip"'
                    raise UserError.one(error.place, error.why, fix) from error
                self._tell(error)
            except Exception as error:
                # Libraries of networks have errors of their own; what is none of these is raised on.
                if not is_transient(error):
                    raise
                attempt += 1
                self._wait(error, attempt)
                shard.load_state_dict(before)

    def leave_out_empty(self) -> None:
        """Count a document that has no tokens, and log the first, the tenth, the hundredth..."""
        self.empty += 1
        if self.empty == 10 ** (len(str(self.empty)) - 1):
            log.warning("dataset %r: documents without text are left out; so far %d", self._name, self.empty)

    def _tell(self, error: CorruptRecord) -> None:
        self.corrupt += 1
        # As errors: only these are logged on ranks other than the first, which have records of their own.
        if self.corrupt <= _TOLD:
            log.error("skipped a corrupt record: %s: %s", error.place, error.why)
        if self.corrupt == _TOLD:
            log.error("further corrupt records of dataset %r are only counted", self._name)

    def _wait(self, error: Exception, attempt: int) -> None:
        reason = f"{type(error).__name__}: {error}"
        if attempt > self._policy.retries:
            why = f"cannot be read, after {self._policy.retries} retries: {reason}"
            raise UserError.one(f"dataset {self._name!r}", why, "check the network or the disk, and start again") from error
        seconds = min(self._policy.first_wait * 2 ** (attempt - 1), LONGEST_WAIT)
        log.warning("dataset %r: %s; trying again in %.0f s (%d)", self._name, reason, seconds, attempt)
        if self.stopped.wait(seconds):
            raise error


def is_transient(error: Exception) -> bool:
    """Whether trying again may help: errors of networks and disks, but not a file that is not there."""
    if isinstance(error, (UserError, *_PERMANENT)):
        return False
    origins = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError) or not origins.isdisjoint(_NETWORK_LIBRARIES)
