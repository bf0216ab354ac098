"""Muon computes each matrix on one rank, and equals one device and torch's own Muon."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titan_core.api import OptimizerSection, ParameterRole, TrainedParameter, UserError
from titan_optim.config import FusedSpec, MuonSection
from titan_optim.matrices import Matrices, matrices_of
from titan_optim.muon import SkippableMuon, orthogonalized, orthogonalized_parts
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

SHAPES: dict[str, tuple[int, ...]] = {
    "square": (8, 8), "tall": (13, 6), "wide": (6, 17), "small": (2, 3), "experts": (4, 6, 10), "bias": (5,),
}  # fmt: skip
"""Rows that 4 ranks divide unevenly, or that leave ranks without any."""
FUSED = {"square": (6, 2), "tall": (8, 5)}
"""Rows of the parts of fused matrices, whose updates depend on the order of rows."""
LR, DECAY = 0.1, 0.2


class Trained:
    """Parameters and their optimizer."""

    def __init__(
        self, place: Callable[[str, Tensor], Tensor] = lambda name, value: value, fused: bool = False, **settings: Any
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            name: nn.Parameter(place(name, torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()
        }
        found = {
            parameter: Matrices(
                parameter,
                FUSED[name] if fused and name in FUSED else tuple(parameter.shape[-2:-1]),
                0 if parameter.dim() == 3 else None,
            )
            for name, parameter in self.parameters.items()
            if parameter.dim() > 1
        }
        rest = [parameter for parameter in self.parameters.values() if parameter not in found]
        groups = [
            {"params": rest, "lr": LR, "weight_decay": DECAY, "muon": False},
            {"params": list(found), "lr": LR, "weight_decay": DECAY, "muon": True},
        ]
        section = MuonSection(**{"dtype": "float32", **settings})
        self.optimizer = SkippableMuon(groups, found, section, OptimizerSection(), torch.device("cpu"))

    def backward(self, step: int, without: str = "") -> None:
        """Set gradients, the same on any mesh, of all parameters but one."""
        generator = torch.Generator().manual_seed(step)
        for name, parameter in self.parameters.items():
            whole = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if name == without else like(whole, parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and states, whole."""
        found = {name: whole(parameter) for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            found |= {f"{name}.{key}": whole(value) for key, value in self.optimizer.state[parameter].items()}
        return found


def like(value: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def steps(trained: Trained) -> dict[str, Tensor]:
    for step in range(3):
        trained.backward(step, without="tall" if step == 1 else "")
        trained.optimizer.step()
    return trained.tensors()


MESHES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),), (Shard(0),)),
    "columns": ((4,), (Shard(1),), (Shard(2),)),
    "rows of experts": ((4,), (Shard(0),), (Shard(1),)),
    "replicas": ((4,), (Replicate(),), (Replicate(),)),
    "replicas of rows": ((2, 2), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1)), (Shard(0), Shard(1))),
    "columns and rows": ((2, 2), (Shard(1), Shard(0)), (Shard(2), Shard(1))),
    "rows twice": ((2, 2), (Shard(0), Shard(0)), (Shard(1), Shard(0))),
}
"""Mesh, placements of matrices and biases, and placements of experts."""


def on_mesh(name: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Return the tensors after three steps, and the most elements of whole matrices that this rank held at once."""
    sizes, placements, of_experts = MESHES[name]
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", sizes)

        def place(parameter: str, value: Tensor) -> Tensor:
            chosen = of_experts if value.dim() == 3 else placements
            if value.dim() == 1:
                chosen = tuple(Shard(0) if isinstance(one, Shard) else one for one in chosen)
            return distribute_tensor(value, mesh, chosen)

        trained = Trained(place, fused=True, **settings)
        held, inner = [0], trained.optimizer._orthogonalized

        def watched(owned: dict[Any, Tensor]) -> dict[Any, Tensor]:
            held.append(sum(one.numel() for one in owned.values()))
            return inner(owned)

        trained.optimizer._orthogonalized = watched  # type: ignore[method-assign]
        return steps(trained), max(held)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rows", "rows twice") else pytest.mark.full) for name in MESHES]
)
def test_matrices_divided_in_any_way_equal_those_of_one_device(gloo: GlooPool, name: str) -> None:
    expected = steps(Trained(fused=True))
    total = sum(torch.Size(shape).numel() for shape in SHAPES.values() if len(shape) > 1)
    for found, held in gloo.run(4, on_mesh, name, {}):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
        assert held < total / 2  # no rank gathers all


def strided(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return a matrix that FSDP 2 divides after another dimension has, once Muon has updated it, and on one device."""
    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Linear(shape[1], shape[0], bias=False)
        value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        module.weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)]))
        fully_shard(module, mesh=mesh["dp"])
        weight = next(module.parameters())
        assert isinstance(weight, DTensor) and len(weight.placements) == 2
        results = []
        for parameter in (weight, nn.Parameter(value.clone())):
            groups = [{"params": [parameter], "lr": LR, "weight_decay": DECAY, "muon": True}]
            found = {parameter: Matrices(parameter, (shape[0] - 3, 3))}
            section = MuonSection(dtype="float32")
            optimizer = SkippableMuon(groups, found, section, OptimizerSection(), torch.device("cpu"))
            parameter.grad = parameter.detach() * 2
            optimizer.step()
            results.append(whole(parameter))
        return results[0], results[1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [8, pytest.param(12, marks=pytest.mark.full)])
def test_shards_of_shards_are_joined_in_order(gloo: GlooPool, rows: int) -> None:
    for found, expected in gloo.run(4, strided, (rows, 6)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_it_equals_torchs_muon(nesterov: bool, scale: str) -> None:
    """Experts are matrices of their own. torch iterates in bfloat16."""
    trained = Trained(dtype="bfloat16", nesterov=nesterov, scale=scale, momentum=0.9)
    copies = {name: nn.Parameter(one.detach().clone()) for name, one in trained.parameters.items() if one.dim() == 2}
    copies |= {
        f"expert {index}": nn.Parameter(one.clone()) for index, one in enumerate(trained.parameters["experts"].detach())
    }
    theirs = torch.optim.Muon(
        copies.values(), lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
    )
    for step in range(3):
        trained.backward(step)
        gradients = {name: one.grad for name, one in trained.parameters.items()}
        assert gradients["experts"] is not None
        gradients |= {f"expert {index}": one for index, one in enumerate(gradients["experts"])}
        for name, copy in copies.items():
            copy.grad = gradients[name]
        trained.optimizer.step()
        theirs.step()
    ours = dict(trained.parameters.items()) | {f"expert {i}": one for i, one in enumerate(trained.parameters["experts"])}
    for name, copy in copies.items():
        torch.testing.assert_close(ours[name].detach(), copy.detach(), rtol=1e-5, atol=1e-6)


def test_iterations_bring_singular_values_close_to_one() -> None:
    matrix = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrix, 5))
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalized(matrix, 5)
    assert (u.mT @ found @ v.mT).diagonal(dim1=1, dim2=2).min() > 0.5  # the same singular vectors


def test_fused_matrices_are_orthogonalised_one_by_one() -> None:
    fused = torch.randn(1, 12, 6, generator=torch.Generator().manual_seed(1))
    found = orthogonalized_parts(fused, (8, 2, 2), 5, "original")
    for part, rows, scale in ((found[:, :8], fused[:, :8], 1.0), (found[:, 8:10], fused[:, 8:10], (6 / 8) ** 0.5)):
        torch.testing.assert_close(part, orthogonalized(rows, 5) * scale)
    assert not torch.allclose(found, orthogonalized(fused, 5), atol=0.05)


@pytest.mark.parametrize("key", ["exclude", "fused"])
def test_a_job_with_a_misspelt_pattern_does_not_start(in_tmp: object, key: str) -> None:
    value = {"exclude": '["*.weight", "*.ruoter.weight"]', "fused": '[{pattern = "*qvk*", rows = [2, 1]}]'}[key]
    with pytest.raises(UserError, match=rf"muon\.{key}, pattern .*: matches no parameter; match parameters such as "):
        run_recipe("tiny", {**TINY, "job.device": "cpu", "optimizer.name": "Muon", f"muon.{key}": value})


def test_fused_rows_must_divide_the_matrix() -> None:
    parameter = TrainedParameter("layers.0.qkv.weight", nn.Parameter(torch.zeros(12, 6)), ParameterRole.HIDDEN_MATRIX)

    class Layout:
        def rule(self, name: str) -> None:
            return None

    layout: Any = Layout()
    section = MuonSection(fused=[FusedSpec(pattern="*.qkv.weight", rows=[4, 1, 1])])
    assert matrices_of(parameter, layout, section).parts == (8, 2, 2)
    with pytest.raises(UserError, match=r"'layers.0.qkv.weight' has 12 rows, which \[3, 2\] does not divide"):
        matrices_of(parameter, layout, MuonSection(fused=[FusedSpec(pattern="*.qkv.weight", rows=[3, 2])]))


def skips() -> tuple[bool, bool]:
    """Return whether steps that are not skipped equal usual ones bit for bit, and whether a skipped one changes nothing."""
    place: Callable[[str, Tensor], Tensor] = lambda name, value: value  # noqa: E731
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        place = lambda name, value: distribute_tensor(value, mesh, [Shard(0)])  # noqa: E731
    try:
        usual, conditional = Trained(place), Trained(place)
        for step in range(3):
            usual.backward(step)
            usual.optimizer.step()
            conditional.backward(step)
            conditional.optimizer.step_unless(torch.tensor(False))
        before, after = usual.tensors(), conditional.tensors()
        same = all(torch.equal(before[key], after[key]) for key in before)
        for parameter in conditional.parameters.values():
            assert parameter.grad is not None
            parameter.grad.fill_(torch.nan)
        conditional.optimizer.step_unless(torch.tensor(True))
        return same, all(torch.equal(before[key], one) for key, one in conditional.tensors().items())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_device_can_skip_a_step(gloo: GlooPool, ranks: int) -> None:
    assert gloo.run(ranks, skips) == [(True, True)] * ranks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"muon.lr": 0.0}, "must be greater than 0"),
        ({"muon.momentum": 1.0}, "must be less than 1"),
        ({"optimizer.beta2": 1.5}, "must be less than 1"),
        ({"muon.steps": 21}, "20"),
        ({"muon.dtype": "float16"}, "bfloat16"),
        ({"muon.fused": '[{pattern = "*qkv*", rows = [3]}]'}, "2"),
        ({"muon.momentums": 0.9}, "momentum"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_one_clear_error(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        make_job("tiny", {"optimizer.name": "Muon", **overrides})
    (problem,) = raised.value.problems
    assert next(iter(overrides)) in str(problem)
