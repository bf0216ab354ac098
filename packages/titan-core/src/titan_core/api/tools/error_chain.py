"""Errors that only follow from the failure or delay of another rank."""

from __future__ import annotations

import re

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
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError"):
        return True
    return name in ("RuntimeError", "DistBackendError", "CheckpointException") and _PEER.search(str(error)) is not None
