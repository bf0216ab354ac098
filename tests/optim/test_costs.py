"""What the optimizers say of themselves is what they do."""

from __future__ import annotations

import pytest

from titan_core.api import OptimizerCosts, hookimpl
from titan_testing.jobs import make_job, run_job


class State:
    """Measures the state of a run's optimizer."""

    @hookimpl
    def titan_train_start(self, run: object) -> None:
        self.run = run

    @hookimpl
    def titan_train_end(self) -> None:
        parts, optimizer = self.run.parts, self.run.state.optimizer  # type: ignore[attr-defined]
        self.bytes = {"hidden": 0, "others": 0}
        self.elements = {"hidden": 0, "others": 0}
        for name, parameter in ((name, one) for part in parts for name, one in part.named_parameters()):
            kind = "hidden" if name.startswith("layers.") and parameter.dim() == 2 else "others"
            self.elements[kind] += parameter.numel()
            self.bytes[kind] += sum(one.nbytes for one in optimizer.state[parameter].values() if one.dim())


def costs_of(name: str) -> OptimizerCosts:
    job = make_job("tiny", {"optimizer.name": name})
    assert job.optimizer.costs is not None
    return job.optimizer.costs.load()(job.optimizer.context(job))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "AdamWBF16", "Muon"])
def test_state_takes_as_many_bytes(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    found, said = State(), costs_of(name)
    settings = {"optimizer.name": name, "training.steps": 1, "training.seq_len": 32, "job.device": "cpu"}
    run_job(make_job("tiny", settings), observers=[found])
    of_matrices = said.state_bytes if said.matrix_state_bytes is None else said.matrix_state_bytes
    assert found.elements["hidden"] > 0
    assert found.bytes["hidden"] == of_matrices * found.elements["hidden"]
    assert found.bytes["others"] == said.state_bytes * found.elements["others"]


@pytest.mark.parametrize(("offload", "expected"), [("false", (12.0, 0.0, 10)), ("true", (20.0, 8.0, 10))])
def test_averages_read_weights_and_themselves(offload: str, expected: tuple[float, float, int]) -> None:
    """And write themselves, 4 bytes each; those on the host are copied to the device and back besides."""
    settings = {"averages.kind": "mean", "averages.freq": 10, "averages.enable_cpu_offload": offload}
    job = make_job("tiny", settings)
    transform = next(one for one in job.transforms if one.name == "averaged_weights")
    assert transform.planning.costs is not None
    costs = transform.planning.costs.load()(transform.context(job))
    assert (costs.after_update_traffic, costs.after_update_copies, costs.after_update_every) == expected
