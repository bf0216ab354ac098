"""Exit statuses, and errors that Titan's own code raises or reads."""

from __future__ import annotations

import codecs
import errno
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from titan_core.api import Problem, RunStopped, UserError
from titan_core.api._shown import show
from titan_core.api.config._sane_values import LOCALE_FIX
from titan_core.api.config.secrets import redact_text
from titan_core.api.plugins.errors import PartOfContract as PartOfContract, PluginFailure as PluginFailure

EXIT_FAILURE: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_NUMERICS: Final = 65
"""A guard of the numerics ended the run (``EX_DATAERR`` of ``sysexits.h``, like the following)."""
EXIT_DATA_ENDED: Final = 66
"""The data ended before the last step (``EX_NOINPUT``)."""
EXIT_LOST_PEER: Final = 69
"""Another rank has vanished or did not answer (``EX_UNAVAILABLE``)."""
EXIT_OUT_OF_MEMORY: Final = 71
"""The host or a device has too little memory (``EX_OSERR``)."""
EXIT_HARDWARE: Final = 74
"""A device or the network between devices failed (``EX_IOERR``)."""
EXIT_PREEMPTED: Final = 75
"""``EX_TEMPFAIL``, a temporary failure: launchers and schedulers retry the job."""
EXIT_BAD_DEVICE: Final = 76
"""A device of this process computes wrong numbers: no rank should run there again."""
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

MOST_ENTRIES: Final = 10_000
"""Maximum number of entries of a folder that are compared with a misspelt name."""
MOST_SUGGESTED: Final = 3
"""Maximum number of names that an error suggests."""

MOST_PROBLEMS: Final = 30
"""Maximum number of mistakes that are printed, and for which a fix is looked up."""


class NumericsStop(RunStopped):
    """A guard ended the run because its numbers are bad. A restart would meet the same numbers again."""

    exit_status = EXIT_NUMERICS


class BadDevice(RunStopped):
    """A device computes wrong numbers. Raised on every rank; only those on such a device are to blame."""

    def __init__(self, message: str, here: bool) -> None:
        """
        Args:
            here: whether it is this rank's device.
        """
        super().__init__(message)
        self.exit_status = EXIT_BAD_DEVICE if here else EXIT_LOST_PEER


def note_of(problem: Problem) -> str:
    """Return ``problem``, something that this machine lacks, as a note for a command that only looks at the job. Secrets are
    removed."""
    return redact_text(str(replace(problem, why=f"{problem.why} (needed where the job trains)")))


def nearest(word: str, known: list[str]) -> str:
    """Return "did you mean ...?" for a misspelt ``word``, or a list of the ``known`` words."""
    close = close_names(word, known)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"available: {', '.join(sorted(known))}" if known else "none is available"


def close_names(word: str, known: Iterable[str]) -> list[str]:
    """Return the names that a misspelt ``word`` may stand for: one, a few that contain it, or none.

    Upper and lower case, dashes and underscores are the same.
    """
    from difflib import get_close_matches

    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_folded(name), name)
    wanted = _folded(word)
    if wanted in names:
        return [names[wanted]]
    begun = [name for name in names if name.startswith(f"{wanted}_")]  # "tiny_1m" of "tiny_1m_laptop"
    if 0 < len(begun) <= MOST_SUGGESTED:
        return [names[name] for name in begun]
    certain = get_close_matches(wanted, names, n=1, cutoff=0.8)
    if certain:
        return [names[certain[0]]]
    parts = {name: set(name.split("_")) for name in names}
    words = set(wanted.split("_"))
    shorter = [name for name in names if parts[name] < words]  # "enable_checkpoint" is an older name of "enable"
    if shorter:
        return [names[max(shorter, key=len)]]
    longer = [name for name in names if words < parts[name]]  # "batch_size" may be the local or the global one
    if not 0 < len(longer) <= MOST_SUGGESTED:
        longer = get_close_matches(wanted, names, n=1, cutoff=0.7)
    return [names[name] for name in longer]


def nearest_path(path: str) -> str:
    """Return a fix for a ``path`` that does not exist: the entry of its folder with the nearest name, if any."""
    missing = Path(path)
    try:
        names = [entry.name for entry in islice(missing.parent.iterdir(), MOST_ENTRIES)]
    except (OSError, ValueError):  # no such folder, a file, or a path that no file system allows
        names = []
    close = close_names(missing.name, names)
    if not close:
        return "check the path"
    return f"did you mean {' or '.join(repr(str(missing.with_name(name))) for name in close)}?"


def _folded(name: str) -> str:
    return name.casefold().replace("-", "_")


def locale_error(error: BaseException) -> UserError | None:
    """Return the error of a name that no file can have in this locale (``LC_ALL=C`` and ``PYTHONUTF8=0``); ``None`` if
    ``error`` is another one."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or not isinstance(error, UnicodeEncodeError):
        return None
    if codecs.lookup(error.encoding).name != codecs.lookup(encoding).name:
        return None
    why = f"cannot be a file's name in this locale, whose encoding is {encoding}"
    return UserError.one(show(error.object), why, LOCALE_FIX)


class Interrupted(BaseException):
    """Raised by a signal handler, wherever the process is. It says nothing about the code that it interrupts, so whoever
    calls plugins lets it pass."""


_OF_TORCH = ("RuntimeError", "AcceleratorError", "DistBackendError", "CheckpointException")
"""Types of the errors that torch raises for the following, and describes only in the message."""
_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory"
    r"|(CUDA|HIP) (error: )?out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
# Not: device-side assertions, illegal addresses and misaligned accesses, which are mistakes in code.
_HARDWARE = re.compile(
    r"\bECC error|uncorrectable (ECC|NVLink)|(?i:\bnvlink error)|\bXid\b|GPU (is lost|has fallen off the bus)"
    r"|CUDA error: (hardware stack error|system not yet initialized|CUDA-capable device\(s\) is/are busy or unavailable)"
    r"|CUDA error: (Invalid access of peer GPU memory over nvlink|unknown error|no CUDA-capable device is detected)"
    r"|ncclSystemError|unhandled system error|\bibv_\w+ failed|\bNET/IB\b.*(failed|error|[Ww]arn)"
)


def exit_status(error: BaseException) -> int:
    """Return the exit status for ``error``, by its type, the types of its causes and, for errors of torch that have no type
    of their own, the message (torch 2.11 to 2.15). An error that only follows from another rank's is a lost peer, whatever
    was raised because of it."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, RunStopped):
        return error.exit_status
    if isinstance(error, UserError) and not isinstance(error, PluginFailure):
        return EXIT_USER_ERROR
    if caused_by_peer(error):
        return EXIT_LOST_PEER
    causes = chain(error)
    if any(map(_lacks_memory, causes)):
        return EXIT_OUT_OF_MEMORY
    if any(type(cause).__name__ in _OF_TORCH and _HARDWARE.search(str(cause)) for cause in causes):
        return EXIT_HARDWARE
    # A plugin's exception may concern this attempt only, like the core's own; what it returned or declared does not change.
    return EXIT_USER_ERROR if isinstance(error, UserError) and error.__cause__ is None else EXIT_FAILURE


def _lacks_memory(error: BaseException) -> bool:
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return name in _OF_TORCH and _MEMORY.search(str(error)) is not None


_PEER = re.compile(
    r"Connection (closed|reset|refused) by|Connection (was )?(closed|reset|refused)|Timed out waiting \d+ms"  # gloo
    r"|Application timeout caused pair closure|Connect(ion)? timeout|Socket closed|Broken pipe"
    r"|ncclRemoteError|remote process exited|communicator was aborted|collective operation timeout"  # NCCL
    r"|Socket Timeout|[Ww]ait timeout|recvValue failed|Failed to recv|Failed to check the \"should dump\" flag",  # TCPStore
)


def chain(error: BaseException) -> list[BaseException]:
    """Return ``error``, its cause, the cause of that, and so on. For an error about a lost peer, only an explicit cause
    counts: the exception that was being handled when it was raised is unrelated."""
    errors = [error]
    while True:
        last = errors[-1]
        before = last.__cause__
        if before is None and not last.__suppress_context__ and not _is_about_a_peer(last):
            before = last.__context__
        if before is None or before in errors:
            return errors
        errors.append(before)


def caused_by_peer(error: BaseException) -> bool:
    """Whether ``error`` began with the failure or absence of another rank: a connection that the rank closed, or a
    collective that it did not join in time. Torch raises a RuntimeError or one of its ``Dist*Error`` types for these. The
    same words in any other error, such as one of a dataset's connection, mean something else. Messages are those of torch
    2.11 to 2.15."""
    return _is_about_a_peer(chain(error)[-1])


def _is_about_a_peer(error: BaseException) -> bool:
    if isinstance(error, BadDevice):
        return error.exit_status == EXIT_LOST_PEER
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError"):
        return True
    return name in ("RuntimeError", "DistBackendError", "CheckpointException") and _PEER.search(str(error)) is not None
