"""The initial rates at which the features of a recurrence forget."""

import torch
from torch import Tensor

from titan_core.api import Elements


def rates(elements: Elements, slowest: float, fastest: float) -> Tensor:
    """Return rates with which the decay of an open gate, ``exp(-8 * softplus(rate))``, is uniform between ``fastest`` and
    ``slowest`` (De et al., arXiv 2402.19427, section 2.4)."""
    decay = fastest + (slowest - fastest) * elements.uniform()
    softplus = -decay.log() / 8.0
    return torch.log(torch.expm1(softplus))
