"""The private torch API that this plugin uses, checked with torch 2.15.

* ``torch.distributed._functional_collectives``: all-to-all on a ``DeviceMesh``, with autograd. Its public counterparts in
  ``torch.distributed.nn.functional`` are deprecated in favour of it.
* ``nn.Module._parameters``: the parameters as registered. Attribute access may return this rank's share of a parameter
  instead, as tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh


def exchange_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Send an equal piece of ``counts`` to each rank of ``mesh``, and return the received pieces in rank order."""
    equal = [len(counts) // mesh.size()] * mesh.size()
    return exchange_rows(counts, equal, equal, mesh)


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh) -> Tensor:
    """Send ``sent[rank]`` rows to each rank of ``mesh``, and return the received rows in rank order. Differentiable.

    Args:
        received: number of rows from each rank.
    """
    return all_to_all_single_autograd(rows, received, sent, mesh)


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
