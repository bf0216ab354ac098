"""Preserving the state of random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
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


_UNTAGGED = ("random", "random_", "binomial", "_sample_dirichlet")
"""Random operators that torch does not mark as such (2.11 to 2.15)."""
_RATES = ("p", "dropout", "dropout_p")
"""Arguments of operators that draw nothing if they are 0."""


@cache
def is_random(operator: Any) -> bool:
    """Return whether some calls of ``operator`` draw random numbers."""
    import torch  # assembly imports this file

    untagged = operator.namespace == "aten" and operator.overloadpacket.__name__ in _UNTAGGED
    return untagged or torch.Tag.nondeterministic_seeded in operator.tags


def draws(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether this call of ``operator`` draws random numbers: an attention without dropout does not."""
    if not is_random(operator):
        return False
    from titan_core.torch_private import named_arguments

    given = named_arguments(operator, arguments, keywords)
    rates = [given[name] for name in _RATES if isinstance(given.get(name), float)]
    return given.get("train", True) is not False and (not rates or any(rates))
