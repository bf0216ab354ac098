"""Reading documents despite errors: transient errors are retried, corrupt records are reported."""

from __future__ import annotations

import logging
import threading
from typing import Any

from titan_core.api import CorruptRecord, Document, DocumentShard, ExcludedRecord, UserError
from titan_core.api.data.dataset import (
    ALL_SPLITS as ALL_SPLITS,
    DatasetSpec as DatasetSpec,
    DocumentPlace,
    FormatSpec as FormatSpec,
    ReadPolicy as ReadPolicy,
    Shuffle as Shuffle,
    State as State,
    StreamSpec as StreamSpec,
)
from titan_core.api.data.replay import (
    DataReplay as DataReplay,
    ReadDocument as ReadDocument,
    StepRows as StepRows,
    UsedTokens as UsedTokens,
)
from titan_core.toolkit.open_files import is_too_many_files
from titan_core.toolkit.stream_check import ShardName, StreamCheck

log = logging.getLogger(__name__)

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_NETWORK_LIBRARIES = {"aiohttp", "httpcore", "httpx", "httpx2", "requests", "urllib3"}
_MOST_LOGGED = 20
LONGEST_WAIT = 3600.0
"""Maximum seconds between two retries."""


def place_of(shard: DocumentShard) -> DocumentPlace | None:
    """Return the place of the document that was read last from ``shard``; ``None`` if the shard does not know it."""
    place: Any = getattr(shard, "place", None)
    found: DocumentPlace | None = place() if place is not None else None
    return found


class DocumentReader:
    """Reads documents from shards, and counts those that it skips."""

    def __init__(self, policy: ReadPolicy, name: str) -> None:
        self._policy, self._name = policy, name
        self.corrupt = 0
        """Number of corrupt records skipped."""
        self.empty = 0
        """Number of documents skipped because they have no tokens of their own, or the dataset's settings exclude them."""
        self.excluded = 0
        """Number of documents skipped because the dataset's settings exclude them."""
        self.stopped = threading.Event()
        """Set when the data is no longer needed."""

    def next(self, shard: DocumentShard, check: StreamCheck | None = None) -> Document | None:
        """Return the next document of ``shard``, or ``None`` at its end.

        Args:
            check: what was read from ``shard`` earlier, which is read again after an error.

        Raises:
            UserError: a record is corrupt and must not be skipped, or the source remains unreadable or returns other records
                than before the error.
        """
        check = check or StreamCheck(ShardName(self._name, 0, 1), shard.state_dict())
        attempt = 0
        while True:
            try:
                return check.read(shard)
            except CorruptRecord as error:
                if self._policy.on_corrupt == "stop":
                    fix = f'{error.fix}, or skip such records: set data.on_corrupt = "skip"'
                    raise UserError.one(error.place, error.why, fix) from error
                self.corrupt += 1
                self._log_skipped(self.corrupt, "corrupt ", error)
            except ExcludedRecord as error:
                self.empty += 1
                self.excluded += 1
                self._log_skipped(self.excluded, "", error)
            except Exception as error:
                # Network libraries have their own exception types; is_transient() recognises them.
                if not is_transient(error):
                    raise
                attempt += 1
                self._wait(error, attempt)
                check.lose()

    def count_empty(self) -> None:
        """Count a document without tokens, and log the first, tenth, hundredth, ..."""
        self.empty += 1
        if self.empty == 10 ** (len(str(self.empty)) - 1):
            log.warning("dataset %r: skipping documents without text; %d so far", self._name, self.empty)

    def _log_skipped(self, count: int, kind: str, error: CorruptRecord | ExcludedRecord) -> None:
        """Log the ``count``-th skipped record of a kind, as an error: ranks other than rank 0 log errors only, and each rank
        reads different records."""
        if count <= _MOST_LOGGED:
            log.error("skipped a %srecord: %s: %s", kind, error.place, error.why)
        if count == _MOST_LOGGED:
            log.error("further %srecords of dataset %r are counted but not logged", kind or "skipped ", self._name)

    def _wait(self, error: Exception, attempt: int) -> None:
        reason = f"{type(error).__name__}: {error}"
        if attempt > self._policy.retries:
            why = f"cannot be read after {self._policy.retries} retries: {reason}"
            raise UserError.one(f"dataset {self._name!r}", why, "check the network or the disk, and restart") from error
        seconds = min(self._policy.first_wait * 2 ** (attempt - 1), LONGEST_WAIT)
        log.warning("dataset %r: %s; retrying in %.0f s (retry %d)", self._name, reason, seconds, attempt)
        if self.stopped.wait(seconds):
            raise error


def is_transient(error: Exception) -> bool:
    """Whether a retry may succeed: true for network and disk errors, but not for a missing file."""
    if isinstance(error, (UserError, *_PERMANENT)) or is_too_many_files(error):
        return False
    origins = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    return isinstance(error, OSError) or not origins.isdisjoint(_NETWORK_LIBRARIES)
