"""Preserving the state of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def same_generators() -> Iterator[None]:
    """Restore the random generators that a model may draw from on exit: Python's, and torch's on the CPU and the current
    device. Observers may change them unknowingly: a module that is imported late may draw from them (Rich does), on one rank
    only, and in a resumed run at another step."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        torch: Any = sys.modules.get("torch")  # if torch is not imported, it has no state to preserve
        if torch is not None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
        yield
