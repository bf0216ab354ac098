"""Errors of a rank that say no more than that another rank is gone or late."""

from __future__ import annotations

import re

_PEER = re.compile(
    r"Connection (closed|reset|refused) by|Connection (was )?(closed|reset|refused)|Timed out waiting \d+ms"  # gloo
    r"|Application timeout caused pair closure|Connect(ion)? timeout|Socket closed|Broken pipe"
    r"|ncclRemoteError|remote process exited|communicator was aborted|collective operation timeout"  # NCCL
    r"|Socket Timeout|[Ww]ait timeout|recvValue failed|Failed to recv|Failed to check the \"should dump\" flag",  # TCPStore
)


def chain(error: BaseException) -> list[BaseException]:
    """``error``, what caused it, what caused that, and so on. An error of another rank's absence has no cause here but one
    that it names: what was being handled when it was raised has nothing to do with it."""
    errors = [error]
    while True:
        last = errors[-1]
        before = last.__cause__
        if before is None and not last.__suppress_context__ and not _tells_of_a_peer(last):
            before = last.__context__
        if before is None or before in errors:
            return errors
        errors.append(before)


def follows_from_a_peer(error: BaseException) -> bool:
    """Whether ``error`` began with another rank's failure or absence: a connection that it closed, a collective that it did
    not join in time. Torch raises such errors as RuntimeError or as one of its ``Dist*Error``; the same words in another
    error, such as a dataset's own connection, mean something else. The messages are those of torch 2.11 to 2.15."""
    return _tells_of_a_peer(chain(error)[-1])


def _tells_of_a_peer(error: BaseException) -> bool:
    name = type(error).__name__
    if name in ("DistNetworkError", "DistStoreError"):
        return True
    return name in ("RuntimeError", "DistBackendError", "CheckpointException") and _PEER.search(str(error)) is not None
