"""Recognises the calls of torch's operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from titan_core.torch_private import named_arguments

_UNTAGGED = ("random", "random_", "binomial", "_sample_dirichlet")
"""Random operators that torch does not mark as such (2.11 to 2.15)."""
_RATES = ("p", "dropout", "dropout_p")
"""Arguments of operators that draw nothing if they are 0."""


@cache
def is_random(operator: Any) -> bool:
    """Return whether some calls of ``operator`` draw random numbers."""
    untagged = operator.namespace == "aten" and operator.overloadpacket.__name__ in _UNTAGGED
    return untagged or torch.Tag.nondeterministic_seeded in operator.tags


def draws(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether this call of ``operator`` draws random numbers: an attention without dropout does not."""
    if not is_random(operator):
        return False
    given = named_arguments(operator, arguments, keywords)
    rates = [given[name] for name in _RATES if isinstance(given.get(name), float)]
    return given.get("train", True) is not False and (not rates or any(rates))
