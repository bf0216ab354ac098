"""Preserving the state of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def same_generators() -> Iterator[None]:
    """Restore the random generators that a model may draw from on exit: Python's, numpy's, and torch's on the CPU and the
    current device. Observers may change them unknowingly: a module that is imported late may draw from them (Rich does), on
    one rank only, and in a resumed run at another step."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            stack.callback(numpy.set_state, numpy.get_state())
        torch: Any = sys.modules.get("torch")  # if torch is not imported, it has no state to preserve
        if torch is not None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
        yield


def python_states() -> tuple[Any, ...]:
    """Return the states of Python's generator and, if it is imported, of numpy's."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    kind, words, *place = numpy.get_state()
    return random.getstate(), kind, words.tobytes(), *place


def reseed(seed: int) -> None:
    """Seed the generators that :func:`same_generators` restores."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
