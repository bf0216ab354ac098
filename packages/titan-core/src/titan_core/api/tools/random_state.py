"""Leaving random generators as they came."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def same_generators() -> Iterator[None]:
    """The random generators that a model may draw from leave as they came: Python's, and torch's on the CPU and on the
    current device. Observers need not draw from them knowingly to change them: a module that is imported late may (Rich
    does), on one rank alone and in a resumed run at another step."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        torch: Any = sys.modules.get("torch")  # without it there is nothing to keep
        if torch is not None:
            devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
            stack.enter_context(torch.random.fork_rng(devices))
        yield
