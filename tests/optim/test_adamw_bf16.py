"""AdamW with bfloat16 state: rounding is right on average, and its bits are the same on any mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titan_core.api.model.random_streams import element_bits, feature_words, of_module, token_words
from titan_optim import adamw_bf16
from titan_optim.adamw_bf16 import AdamWBF16, rounded
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 12), "stack": (4, 3, 6), "vector": (5,), "scalar": ()}
BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-2, 0.1


class Trained:
    def __init__(self, place: Callable[[Tensor], Tensor] = lambda value: value) -> None:
        generator = torch.Generator().manual_seed(0)
        values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.place = place
        self.parameters = {name: nn.Parameter(place(value)) for name, value in values.items()}
        names = {parameter: name for name, parameter in self.parameters.items()}
        groups = [{"params": list(names), "lr": LR, "weight_decay": DECAY}]
        self.optimizer = AdamWBF16(groups, names, betas=BETAS, eps=EPS, seed=3)

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters.values():
            parameter.grad = self.place(torch.randn(parameter.shape, generator=generator))

    def tensors(self) -> dict[str, Tensor]:
        found = {name: whole(parameter) for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            found |= {f"{name}.{key}": whole(value) for key, value in self.optimizer.state[parameter].items()}
        return found


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def steps(trained: Trained) -> dict[str, Tensor]:
    for step in range(4):
        trained.backward(step)
        trained.optimizer.step()
    return trained.tensors()


def on_mesh(sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", sizes)

        def place(value: Tensor) -> Tensor:
            return distribute_tensor(
                value, mesh, [one if isinstance(one, Shard) and one.dim < value.dim() else Replicate() for one in placements]
            )

        return steps(Trained(place))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((4,), (Shard(0),)),
        ((2, 2), (Shard(1), Shard(0))),
        pytest.param((2, 2), (Replicate(), Shard(1)), marks=pytest.mark.full),
    ],
    ids=["rows", "columns and rows", "replicas of columns"],
)
def test_state_has_the_same_bits_on_any_mesh(
    gloo: GlooPool, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    expected = steps(Trained())
    for found in gloo.run(4, on_mesh, sizes, placements):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = steps(Trained())
    monkeypatch.setattr(adamw_bf16, "CHUNK_ON_CPU", 20)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in steps(Trained()).items())


def test_it_follows_torchs_adamw_as_far_as_state_is_exact() -> None:
    """The first step does not read rounded state. Later ones do, with an error of 1/256 at most in each mean."""
    trained = Trained()
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.parameters.items()}
    theirs = torch.optim.AdamW(copies.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(5):
        trained.backward(step)
        for name, copy in copies.items():
            copy.grad = trained.parameters[name].grad
        trained.optimizer.step()
        theirs.step()
        for name, copy in copies.items():
            atol = 1e-7 if step == 0 else LR / 32 * step
            torch.testing.assert_close(trained.parameters[name].detach(), copy.detach(), rtol=1e-6, atol=atol)
            state = trained.optimizer.state[trained.parameters[name]]
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16


def bits_of(step: int, rows: int, columns: int) -> Tensor:
    key = torch.tensor(step)
    words = of_module(
        key, token_words(key, torch.arange(rows), torch.zeros(1, dtype=torch.int64)), feature_words(key, 0, columns)
    )
    return element_bits(words)


def test_rounding_is_right_on_average_and_moves_by_at_most_one_step() -> None:
    values = torch.tensor([1.0 + 2.0**-9, -3.0 - 2.0**-10, 1e-30, 0.0, 1.5]).repeat(40_000, 1)
    found = rounded(values, bits_of(1, *values.shape) & 0xFFFF).double()
    exact = values[0].double()
    error = (found.mean(0) - exact) / exact.abs().clamp(min=1e-30)
    assert error.abs().max() < 5 * 2.0**-8 * 0.5 / 40_000**0.5  # five standard deviations
    assert ((found - exact).abs() <= exact.abs() * 2.0**-7).all()
    assert (found[:, 3:] == exact[3:]).all()  # what bfloat16 has stays
    assert (
        rounded(torch.tensor([torch.inf, torch.nan]), torch.tensor([0xFFFF, 0xFFFF], dtype=torch.int32)).isfinite() == 0
    ).all()


def test_a_mean_decays_that_the_nearest_rounding_would_keep() -> None:
    """With beta2 = 0.999, a step changes the mean of squares by less than half a step of bfloat16."""
    trained = Trained()
    trained.backward(0)
    trained.optimizer.step()
    state = trained.optimizer.state[trained.parameters["matrix"]]
    before = state["exp_avg_sq"].double().sum()
    for _ in range(400):
        for parameter in trained.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        trained.optimizer.step()
    assert state["exp_avg_sq"].double().sum() / before == pytest.approx(0.999**400, rel=0.05)


def test_the_device_can_skip_a_step() -> None:
    usual, conditional = Trained(), Trained()
    for step in range(3):
        for trained in (usual, conditional):
            trained.backward(step)
        usual.optimizer.step()
        conditional.optimizer.step_unless(torch.tensor(False))
        for parameter in conditional.parameters.values():
            parameter.grad = torch.full_like(parameter, torch.nan)
        conditional.optimizer.step_unless(torch.tensor(True))
    assert all(torch.equal(tensor, usual.tensors()[name]) for name, tensor in conditional.tensors().items())


@pytest.mark.full
def test_a_run_learns_as_with_adamw(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    settings = {"training.steps": 12, "training.seq_len": 64, "training.global_batch_size": 4, "job.device": "cpu"}
    losses = {name: run_recipe("tiny", {**settings, "optimizer.name": name}).losses for name in ("AdamW", "AdamWBF16")}
    assert losses["AdamWBF16"][0] == losses["AdamW"][0]
    assert losses["AdamWBF16"] == pytest.approx(losses["AdamW"], rel=5e-3)
    assert losses["AdamWBF16"] != losses["AdamW"]
