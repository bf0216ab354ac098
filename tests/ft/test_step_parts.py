"""What a group draws and leaves behind in a step, and the state that a peer copies: one group, and fakes of the others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_core.api import ModelPart, StepAbandoned, StepInput, UserError
from titan_core.api.parallel.microbatch import AuxiliaryLosses
from titan_ft import step as shared
from titan_ft.run_state import apply, collect
from titan_ft.step import SharedStep

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))


class Draws:
    """A step runner that draws as dropout does, and keeps what it drew."""

    def __init__(self, model: Model, counts: bool = False) -> None:
        self.model, self.counts = model, counts
        self.drawn: list[tuple[int, float, float]] = []

    def __call__(self, inputs: StepInput) -> Tensor:
        self.drawn.append((len(inputs.batches), torch.rand(()).item(), random.random()))
        loss = self.model.weight.sum()
        loss.backward()
        if self.counts:
            self.model.get_buffer("calls").add_(1)
        return loss.detach()


def step_of(
    runner: Draws, monkeypatch: pytest.MonkeyPatch, rank: int = 0, participants: int = 2, data_rank: int = 0
) -> SharedStep:
    """Return the step of group ``rank``, whose sums with the others do nothing."""
    part: Any = ModelPart(runner.model, layout=None, objective=None)  # type: ignore[arg-type]
    part.auxiliary_losses = ()
    monkeypatch.setattr(shared, "sum_step", lambda groups, parts, loss, *others: loss)
    monkeypatch.setattr(shared, "collect", lambda run: {})
    job = SimpleNamespace(section=lambda cls: SimpleNamespace(train_timeout_seconds=1.0))
    found = SharedStep(runner, [part], SimpleNamespace(section=SimpleNamespace(group_size=2, replica_id=rank), job=job))  # type: ignore[arg-type]
    found._groups = SimpleNamespace(  # type: ignore[assignment]
        rank=rank, participants=participants, step=0, join=lambda: (False, None), commit=lambda: None
    )
    found._run = SimpleNamespace(world=SimpleNamespace(rank=1, data_rank=data_rank, device=CPU))  # type: ignore[assignment]
    return found


def drawn(monkeypatch: pytest.MonkeyPatch, step: int = 1, **group: int) -> tuple[int, float, float]:
    """Return the number of microbatches of a step, and what the step drew: from torch's and from Python's generator."""
    runner = Draws(Model())
    step_of(runner, monkeypatch, **group)(StepInput([None] * 5, step, 3, auxiliary=AuxiliaryLosses(1.0)))  # type: ignore[list-item]
    return runner.drawn[-1]  # the first is the warm-up


def test_groups_ranks_and_steps_draw_differently_and_a_repeated_step_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, int]] = [{}, {"rank": 1}, {"data_rank": 1}, {"step": 2}]
    found = [drawn(monkeypatch, **kind) for kind in kinds]
    assert [count for count, _, _ in found] == [2, 3, 2, 2]
    for generator in (1, 2):
        assert len({draw[generator] for draw in found}) == len(kinds)
    assert [drawn(monkeypatch, **kind) for kind in kinds] == found


def test_a_step_leaves_the_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0), random.seed(0)
    expected = torch.rand(()).item(), random.random()
    torch.manual_seed(0), random.seed(0)
    drawn(monkeypatch)
    assert (torch.rand(()).item(), random.random()) == expected


def test_the_warm_up_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Draws(Model())
    run = step_of(runner, monkeypatch)
    run(StepInput([None] * 2, 1, 3, auxiliary=AuxiliaryLosses(1.0)))  # type: ignore[list-item]
    assert [count for count, _, _ in runner.drawn] == [1, 1]  # of the warm-up and of the step
    assert runner.model.weight.grad is not None and runner.model.weight.grad.tolist() == [1.0, 1.0]


def test_a_buffer_that_changes_in_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="buffer 'calls' of the model: changes in training"):
        step_of(Draws(Model(), counts=True), monkeypatch)(
            StepInput([None] * 2, 1, 3, auxiliary=AuxiliaryLosses(1.0))  # type: ignore[list-item]
        )


def test_a_group_that_has_copied_a_state_repeats_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step_of(Draws(Model()), monkeypatch)
    run._groups.join = lambda: (True, None)  # type: ignore[union-attr, method-assign]
    run._run.state = SimpleNamespace(step=0)  # type: ignore[union-attr, misc, assignment]
    run._run.world.raise_together = lambda mistake: None  # type: ignore[union-attr, method-assign]
    inputs = StepInput([None] * 2, 1, 3, auxiliary=AuxiliaryLosses(1.0))  # type: ignore[list-item]
    with pytest.raises(StepAbandoned):
        run(inputs)
    assert run.titan_figures()["repeated_steps"] == 1
    run(inputs)  # in the same quorum
    assert run.titan_figures()["replica_groups"] == 2


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Observers:
    def __init__(self) -> None:
        self.state = {"detector": [0.0]}
        self.tensor = torch.zeros(1)

    def save_state(self) -> dict[str, list[float]]:
        return dict(self.state)

    def restore_state(self, state: dict[str, list[float]]) -> None:
        self.state = dict(state)

    def state_tensors(self) -> dict[str, Tensor]:
        return {"average": self.tensor}


def run_of(value: float) -> Any:
    """Return a run after one step, everything in whose state depends on ``value``."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model.weight.data.fill_(value)
    model.get_buffer("calls").fill_(value)
    model.weight.grad = torch.full((2,), value)
    optimizer.step()
    schedule.step()
    loader, observers = Loader(), Observers()
    loader.position = int(100 * value)
    observers.state["detector"] = [value]
    observers.tensor.fill_(value)
    part: Any = ModelPart(model, layout=None, objective=None)  # type: ignore[arg-type]
    state = SimpleNamespace(
        parts=[part], optimizer=optimizer, lr_scheduler=schedule, loader=loader, step=int(10 * value),
        tokens_seen=int(1000 * value), tokens_by_dataset={"a": int(1000 * value)}, origin={"run": str(value)},
    )  # fmt: skip
    return SimpleNamespace(state=state, observers=observers, world=SimpleNamespace(device=CPU))


def test_a_peer_copies_the_whole_state() -> None:
    source, target = run_of(0.25), run_of(0.5)
    torch.manual_seed(5), random.seed(5)
    sent = collect(source)
    expected = torch.rand(()).item(), random.random()
    apply(sent, target)
    assert (torch.rand(()).item(), random.random()) == expected
    received = collect(target)
    for key in sent.keys() - {"generators", "tensors", "optimizer"}:
        assert received[key] == sent[key], key
    assert received["tensors"].keys() == sent["tensors"].keys() == {"model.weight", "model.calls", "observers.average"}
    for name, tensor in sent["tensors"].items():
        assert torch.equal(received["tensors"][name], tensor), name
    assert target.state.optimizer.param_groups[0]["lr"] == source.state.optimizer.param_groups[0]["lr"] == 0.125
    (mine,), (theirs,) = target.state.optimizer.state.values(), source.state.optimizer.state.values()
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"]) and torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])


def test_a_state_of_other_tensors_is_refused() -> None:
    sent = collect(run_of(0.25))
    del sent["tensors"]["model.calls"]
    with pytest.raises(ValueError, match=r"does not have the same tensors: \['model\.calls'\]"):
        apply(sent, run_of(0.5))
