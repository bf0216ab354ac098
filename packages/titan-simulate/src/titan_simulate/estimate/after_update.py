"""The time of what transforms do after an update, such as averaging weights. Free of torch.

A simulated step does not contain it: it may happen after some updates only, and observers share the moment with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from titan_core.api import Costs
from titan_simulate.estimate.roofline import moving_seconds
from titan_simulate.hardware.machine import Machine


def seconds_after_update(costs: Iterable[Costs], elements: float, beside: float, machine: Machine) -> float:
    """Return by how many seconds a step is longer on average.

    Args:
        elements: of trained parameters on a rank.
        beside: seconds of forward and backward of the next step, beside which copies run.
    """
    found = 0.0
    for one in costs:
        traffic, copies = (int(elements * each) for each in (one.after_update_traffic, one.after_update_copies))
        if machine.host.computes:  # a copy reads and writes the same memory, and nothing runs beside
            seconds = (traffic + 2 * copies) / (machine.host.optimizer_gb_s * 1e9)
        elif copies:
            seconds = max(0.0, moving_seconds(traffic, machine) + copies / (machine.host.copy_gb_s * 1e9) - beside)
        else:
            seconds = moving_seconds(traffic, machine)
        found += seconds / one.after_update_every
    return found
