"""The figures of a simulation, against a computation by hand."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from harness.fake_cuda import FakeCuda
from titan_core.api import UserError
from titan_testing.jobs import make_job

if TYPE_CHECKING:
    from titan_simulate.engine.result import SimulatedRank

result = pytest.importorskip("titan_simulate.engine.result")

MODEL = {"model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}", "training.seq_len": 64}


def simulate(steps: int, observer: Any = None, **options: Any) -> SimulatedRank:
    from titan_core.loop.training import train
    from titan_simulate.engine.data import SETTINGS
    from titan_simulate.engine.simulate import simulate

    with tempfile.TemporaryDirectory() as folder:
        job = make_job("tiny", {"training.steps": steps, "job.dump_folder": folder, **SETTINGS, **MODEL}, missing_ok=True)
        return simulate(job, train, observers=[observer] if observer else [], strict=False, **options)


def test_the_first_step_of_a_resumed_run_is_like_a_second_one(fake_cuda: FakeCuda) -> None:
    second, resumed = (found.steps[-1] for found in (fake_cuda.call(simulate, 2), fake_cuda.call(simulate, 1, resumed=True)))
    assert [(phase.name, phase.launches, phase.flops) for phase in resumed.phases] == [
        (phase.name, phase.launches, phase.flops) for phase in second.phases
    ]
    assert resumed.collectives == second.collectives
    kept = 4096  # of the step before: its tokens and targets, until observers have read its loss
    assert 0 <= second.peak.bytes - resumed.peak.bytes < kept
    assert resumed.peak.owners[result.Owner.OPTIMIZER] == second.peak.owners[result.Owner.OPTIMIZER]


def test_a_resumed_step_gives_the_allocations_of_two(fake_cuda: FakeCuda) -> None:
    from titan_simulate.engine.allocator import replay
    from titan_simulate.engine.resumed import from_the_start

    two = fake_cuda.call(simulate, 2).allocations
    made = from_the_start(fake_cuda.call(simulate, 1, resumed=True).allocations)
    names, found = ([name for _, name in trace.moments if "step" not in name] for trace in (two, made))
    assert found == names
    assert abs(replay(made.events, False).reserved - replay(two.events, False).reserved) <= 2**21


class _EndsTheFirstStep:
    """Sends this process SIGTERM in the first backward pass."""

    def attach(self, observation: object) -> None:
        """Do nothing."""

    def __call__(self, operation: Any) -> None:
        """Send it."""
        if operation.phase == "backward":
            os.kill(os.getpid(), signal.SIGTERM)


def simulate_until_a_signal() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the trainer handles the first one, and restores this for the others
    simulate(3, _EndsTheFirstStep())


def test_a_simulation_that_a_signal_ends_has_no_result(fake_cuda: FakeCuda) -> None:
    with pytest.raises(UserError, match="ended by a signal after step 1"):
        fake_cuda.call(simulate_until_a_signal)
