"""The limit on open files, of which every connection to another rank is one. Free of torch."""

from __future__ import annotations

import errno
from contextlib import suppress

from titan_core.api import UserError

_SPARE = 64
"""Files that a process opens in any case: libraries, logs, data, checkpoints."""
_ENOUGH = 65536


def is_too_many_files(error: BaseException) -> bool:
    """Whether ``error`` says that this process, or the machine, may not open another file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def too_many_files(where: str) -> UserError:
    """Return the error that reports it.

    Args:
        where: what would have opened the file.
    """
    why = "this process has as many files open as it may, or the machine as many as its kernel allows"
    fix = f"raise the limit (`ulimit -n {_ENOUGH}`), or run fewer processes"
    return UserError.one(where, why, fix)


def allow_open_files(connections: int) -> None:
    """Raise this process's limit on open files as far as it may, and check that it allows ``connections`` to other
    processes. Child processes inherit the limit.

    Raises:
        UserError: the hard limit is too low.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system, and no such limit
        return
    needed = connections + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = max(needed, _ENOUGH)
    if soft != unlimited and soft < most:
        with suppress(ValueError, OSError):  # macOS allows less than its hard limit; what counts is checked below
            resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == unlimited else min(most, hard), hard))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != unlimited and soft < needed:
        why = f"allows {soft} open files (hard limit {hard}), but this process needs {needed}: {connections} connections"
        fix = f"raise the hard limit to {most}: nofile in /etc/security/limits.conf, LimitNOFILE of a systemd service such "
        raise UserError.one("ulimit -n", why, f"{fix}as slurmd, or --ulimit nofile={most} of a container")
