"""The keys of a config that let the library's model draw random numbers in training. Titan has no mesh-invariant streams for
them (:class:`titan_core.api.RandomStream`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from titan_core.api import UserError
from titan_core.toolkit.random_state import draws
from titan_models_hf import transformers_private as library
from titan_models_hf.config import HFArgs
from titan_models_hf.library import configuration
from titan_models_hf.torch_private import TorchDispatchMode

_RATE = re.compile("drop|jitter|noise|stochastic")


class Drawing(TorchDispatchMode):
    """Records the operators of a call, and those that draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: Counter[tuple[str, str]] = Counter()
        """How often each module calls each random operator."""
        self.numbers: list[tuple[Any, ...]] = []
        """The operators, and the numbers that they are called with."""
        self.inside = [""]
        """The modules that are being called."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        numbers = (value for value in (*arguments, *keywords.values()) if isinstance(value, int | float))
        self.numbers.append((operator, *numbers))
        result = operator(*arguments, **keywords)
        if draws(operator, arguments, keywords):
            self.draws[self.inside[-1], operator.overloadpacket.__name__] += 1
            if isinstance(result, Tensor) and result.is_floating_point() and not result.is_meta:
                result.fill_(1.0 - 2.0**-24)  # a draw that skips a layer would change what is recorded
        return result


def random_keys(args: HFArgs, found: Drawing, trace: Callable[[HFArgs], Drawing]) -> dict[str, float]:
    """Return the keys, and their values, without which a call of the model draws less; and those whose names are of rates
    and which a call that draws computes with.

    Args:
        found: a call of the model.
        trace: calls a model in the same way.
    """
    keys: dict[str, float] = {}
    for path, value in _fractions(library.plain_config(configuration(args)), ()):
        try:
            other = trace(_without(args, path))
        except UserError:  # not a rate: the model needs it
            continue
        rate = _RATE.search(path[-1]) is not None
        if other.draws.total() < found.draws.total() or (rate and other.numbers != found.numbers):
            keys[".".join(path)] = value
    return keys


def _fractions(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _fractions(value, (*path, key))
        elif isinstance(value, float) and 0.0 < value <= 1.0:
            yield (*path, key), value


def _without(args: HFArgs, path: tuple[str, ...]) -> HFArgs:
    renamed = library.renamed_keys(args.architecture)
    names = {name for pair in renamed.items() if path[0] in pair for name in pair}
    config = {key: value for key, value in args.config.items() if key not in names}
    inner = library.plain_config(configuration(args)).get(path[0])
    return args.model_copy(update={"config": {**config, path[0]: _zeroed(inner, path[1:])}})


def _zeroed(value: Any, path: tuple[str, ...]) -> Any:
    return {**value, path[0]: _zeroed(value[path[0]], path[1:])} if path else 0.0
