"""The private torch API that this plugin uses, checked with torch 2.15.

* ``torch.ops._c10d_functional``: all-to-all and the wait for it, as two operators that can be compiled. The public ones of
  ``torch.distributed.nn.functional`` are deprecated, and wait at once.
* ``nn.Module._parameters``: the parameters as registered. Attribute access may return this rank's share of a parameter
  instead, as tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def start_all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Start to send ``sent[rank]`` of the contiguous ``rows`` to each rank of the group called ``group``. Return the rows
    that arrive, in the order of the ranks, for :func:`wait`. Has no gradient.

    Args:
        received: number of rows from each rank.
    """
    result: Tensor = torch.ops._c10d_functional.all_to_all_single.default(rows, received, sent, group)
    return result


def wait(arriving: Tensor) -> Tensor:
    """Return what a collective that has been started returns. Has no gradient."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor.default(arriving)
    return result


def registered_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters that ``module`` itself owns, by name, as registered."""
    return module._parameters


@contextmanager
def substituted_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Make the code of ``module`` read ``tensors`` in place of its parameters with the same names."""
    parameters = registered_parameters(module)
    originals = {name: parameters[name] for name in tensors}
    parameters.update(tensors)
    try:
        yield
    finally:
        parameters.update(originals)
