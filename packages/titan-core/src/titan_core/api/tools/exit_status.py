"""The exit status of a process that an exception ended. Free of torch, whose exceptions are known by their type's name."""

from __future__ import annotations

import errno
import re

from titan_core.api.errors import (
    EXIT_FAILURE,
    EXIT_HARDWARE,
    EXIT_INTERRUPTED,
    EXIT_LOST_PEER,
    EXIT_OUT_OF_MEMORY,
    EXIT_USER_ERROR,
    PluginFailure,
    RunStopped,
    UserError,
)
from titan_core.api.tools.error_chain import caused_by_peer, chain

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
