"""The time of work after an update, against arithmetic by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")

from titan_core.api import Costs
from titan_simulate.estimate.after_update import seconds_after_update
from titan_simulate.hardware.read import read_machine

H100 = read_machine("h100")
ELEMENTS = 10**9
ON_DEVICE = Costs(after_update_traffic=12.0, after_update_every=4)
ON_HOST = Costs(after_update_traffic=20.0, after_update_copies=8.0)


def test_what_the_device_does_makes_every_step_longer() -> None:
    moved = 12 * ELEMENTS / (H100.memory.bandwidth_gb_s * H100.memory.efficiency * 1e9)
    assert seconds_after_update([Costs(), ON_DEVICE], ELEMENTS, 10.0, H100) == pytest.approx(moved / 4)


def test_copies_run_beside_the_next_step_and_the_rest_of_them_is_waited_for() -> None:
    whole = 20 * ELEMENTS / (H100.memory.bandwidth_gb_s * H100.memory.efficiency * 1e9) + 8 * ELEMENTS / (
        H100.host.copy_gb_s * 1e9
    )
    assert 0.1 < whole < 1.0
    assert seconds_after_update([ON_HOST], ELEMENTS, 1.0, H100) == 0.0
    assert seconds_after_update([ON_HOST], ELEMENTS, 0.1, H100) == pytest.approx(whole - 0.1)


def test_a_host_that_computes_does_nothing_beside() -> None:
    host = H100.host.model_copy(update={"computes": True, "optimizer_gb_s": 10.0})
    machine = H100.model_copy(update={"host": host})
    assert seconds_after_update([ON_HOST], ELEMENTS, 10.0, machine) == pytest.approx((20 + 2 * 8) / 10.0)
