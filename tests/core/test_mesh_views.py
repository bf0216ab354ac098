"""Views of the mesh, and the ranks that see different data for a parameter."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from titan_core.api import MeshDim, MeshPlan, MeshView, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.parallel.mesh import STANDARD_DIMS, sound_views
from titan_core.config.load import load_config
from titan_core.job.mesh_plan import plan_mesh
from titan_core.loop.optimizer_step import global_norm, local_gradients
from titan_core.loop.world import join_world
from titan_core.plugins.registry import Components
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import make_job

# The views use the keys of other dimensions: these tests know no plugin.
EP = MeshView("ep", "parallelism.tensor_parallel_degree", borrows=("dp_shard", "cp"))


def plan(world: int | None, **degrees: int) -> MeshPlan:
    keys = {"shard": "data_parallel_shard", "cp": "context_parallel", "ep": "tensor_parallel"}
    given = [Override(f"parallelism.{keys[name]}_degree", str(degree)) for name, degree in degrees.items()]
    config, _ = load_config("tiny", given, Components.from_installed())
    found = plan_mesh(config, (), None if world is None else world * degrees.get("ep", 1), (EP,))
    # Remove the dimension whose key the view uses.
    return replace(found, degrees={**found.degrees, "tp": 1})


@pytest.mark.parametrize(
    ("world", "degrees", "shard"),
    [
        (4, {"ep": 2}, 4),
        (4, {"ep": 4, "cp": 2}, 2),
        (None, {"ep": 4}, 4),  # the smallest world with enough ranks to borrow
        (None, {"ep": 4, "cp": 2}, 2),
        (None, {"ep": 3, "cp": 2}, 3),
        (None, {}, 1),
    ],
    ids=str,
)
def test_a_view_does_not_multiply_the_world(world: int | None, degrees: dict[str, int], shard: int) -> None:
    found = plan(world, **degrees)
    assert found.degrees["dp_shard"] == shard
    assert found.degree("ep") == degrees.get("ep", 1)
    assert found.world_size == shard * degrees.get("cp", 1)
    assert found.batch_degree == shard
    assert found.data_degree == found.world_size


def test_a_view_must_divide_the_borrowed_ranks() -> None:
    message = r"must divide the 4 ranks that mesh view 'ep' borrows \(dp_shard 2 x cp 2\); set .* = 1, 2 or 4, or"
    with pytest.raises(UserError, match=message):
        plan(None, ep=3, shard=2, cp=2)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([MeshView("tp", "a.b", ("cp",))], "two plugins define 'tp'"),
        ([EP, MeshView("ep", "a.b", ("cp",))], "two plugins define 'ep'"),
        ([EP, MeshView("ep_remainder", "a.b", ("cp",))], "two plugins define 'ep_remainder'"),
        ([MeshView("ep", "a.b", borrows=("ring",))], "borrows 'ring', which is not a mesh dimension"),
        ([MeshView("ep", "a.b", borrows=("dp_shard", "tp"))], "borrows 'tp', whose ranks see the same tokens"),
        (
            [MeshView("ep", "a.b", borrows=("tp", "cp"), folds_weights=True)],
            "borrows tp and cp, of which a dimension that divides weights is not innermost",
        ),
        ([MeshView("ep", "a.b", borrows=("tp",), folds_weights=True)], "a dimension that divides weights is not innermost"),
        ([MeshView("ep", "a.b", borrows=("dp_shard", "pp"), folds_weights=True)], "borrows 'pp', whose ranks see the same"),
        (
            [MeshView("ep", "a.b", borrows=("island",))],
            "borrows 'island', whose ranks see the same tokens or train diverging replicas",
        ),
        ([MeshView("ep", "a.b", borrows=("dp_replicate", "dp_shard"))], "which data parallelism does not handle in the"),
        ([MeshView("ep", "a.b", borrows=("own",))], "which data parallelism does not handle in the"),
        ([MeshView("ep", "a.b", borrows=())], "borrows no dimension"),
    ],
    ids=str,
)
def test_impossible_views_are_refused(views: list[MeshView], message: str) -> None:
    island = MeshDim("island", "a.b", "batch", diverges=True)
    own = MeshDim("own", "a.b", "batch", data_parallel="own")
    with pytest.raises(UserError, match=message):
        sound_views(views, (*STANDARD_DIMS, island, own))
    assert sound_views([EP, EP], STANDARD_DIMS) == (EP,)


def fold(half: int, ep: int, whole: bool) -> MeshPlan:
    """Return the mesh of four ranks whose view ``ep`` also borrows ``half``, a dimension that divides weights."""
    values = {"metrics.log_freq": half, "training.local_batch_size": ep, "metrics.enable_console": str(whole).lower()}
    config, _ = load_config(
        "tiny", [Override(key, str(value)) for key, value in values.items()], Components.from_installed()
    )
    dim = MeshDim("half", "metrics.log_freq", "weights", whole_positions_key="metrics.enable_console")
    view = MeshView("ep", "training.local_batch_size", borrows=("dp_shard", "cp", "half"), folds_weights=True)
    return plan_mesh(config, (dim,), 4, (view,))


def test_a_view_borrows_ranks_that_divide_weights_where_their_positions_differ() -> None:
    for half, ep, whole, borrowed, folded in [(2, 4, False, 4, ("half",)), (2, 2, True, 2, ()), (1, 4, False, 4, ())]:
        found = fold(half, ep, whole)
        assert (found.borrowed(found.views[0]), found.folded(found.views[0])) == (borrowed, folded)
    message = (
        r"must divide the 2 ranks that mesh view 'ep' borrows \(dp_shard 2 x cp 1\); the 2 ranks of half hold the same "
        r"positions; set .* = 1 or 2, or increase dp_shard, or set metrics.enable_console = false"
    )
    with pytest.raises(UserError, match=message):
        fold(2, 4, whole=True)


def meshes(folder: str, degrees: dict[str, int], borrows: tuple[str, ...]) -> dict[str, Any]:
    """Return this rank's row or table of ranks in each mesh, by purpose; and its share of a gradient norm."""
    from torch.distributed.tensor import Shard, distribute_tensor

    os.chdir(folder)
    zone = MeshDim("zone", "a.b", "batch", data_parallel="replicate")
    dims = (STANDARD_DIMS[0], STANDARD_DIMS[1], zone, *STANDARD_DIMS[2:])
    of_dims = {dim.name: degrees.get(dim.name, 1) for dim in dims}
    view = MeshView("ep", "a.b", borrows, folds_weights=True)
    mesh_plan = MeshPlan(dims, of_dims, (view,), {"ep": 2})
    job = make_job("tiny", {"job.device": "cpu"}, world_size=1)
    with join_world(replace(job, mesh=mesh_plan)) as world:
        mesh = world.mesh
        whole = torch.arange(16.0).view(8, 2)
        divided = nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)]))
        both = nn.Parameter(distribute_tensor(whole, mesh["ep_remainder", "ep"], [Shard(1), Shard(0)]))
        everywhere = nn.Parameter(whole.clone())
        for parameter in (divided, both, everywhere):
            parameter.grad = parameter.detach().clone()
        assert [mesh.view_of(one) for one in (divided, both, everywhere)] == ["ep", "ep", None]
        for name in borrows:
            with pytest.raises(
                UserError, match=f"mesh view 'ep': borrows '{name}', so that nothing can be divided over both"
            ):
                mesh["ep", name]
        return {
            "ep": mesh["ep"].mesh.tolist(),
            "data": mesh.data_mesh().mesh.tolist(),
            "data of ep": mesh.data_mesh("ep").mesh.tolist(),
            "coordinate": world.coordinate("ep"),
            "norm": global_norm(local_gradients([divided, both, everywhere]), world).item() / whole.norm().item(),
        }


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("degrees", "borrows", "expected"),
    [
        ({"dp_shard": 4}, ("dp_shard", "cp"), {"ep": [0, 1], "data": [0, 1, 2, 3], "data of ep": [0, 2]}),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp"), {"ep": [0, 1], "data": [0, 1, 2, 3], "data of ep": [0, 2]}),
        ({"dp_shard": 2, "tp": 2}, ("dp_shard", "cp"), {"ep": [0, 2], "data": [0, 2], "data of ep": [0]}),
        ({"dp_shard": 2, "tp": 2}, ("dp_shard", "tp"), {"ep": [0, 1], "data": [0, 2], "data of ep": [0, 2]}),
        ({"dp_replicate": 2, "tp": 2}, ("dp_shard", "tp"), {"ep": [0, 1], "data": [[0], [2]], "data of ep": [[0], [2]]}),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard",), {"ep": [0, 2], "data": [0, 1, 2, 3], "data of ep": [0, 1]}),
        ({"zone": 2, "dp_shard": 2}, ("dp_shard",), {"ep": [0, 1], "data": [[0, 1], [2, 3]], "data of ep": [[0], [2]]}),
        ({"zone": 2, "dp_replicate": 2}, ("zone",), {"ep": [0, 1], "data": [[0], [1], [2], [3]], "data of ep": [[0], [2]]}),
    ],
    ids=str,
)
def test_which_ranks_see_different_data(
    gloo: GlooPool, tmp_path: Any, degrees: dict[str, int], borrows: tuple[str, ...], expected: dict[str, Any]
) -> None:
    found = gloo.run(4, meshes, str(tmp_path), degrees, borrows)
    assert {key: found[0][key] for key in expected} == expected
    for ranks in found:
        assert ranks["norm"] == pytest.approx(3**0.5, rel=1e-6)  # of three equal gradients, however they are sharded
    assert sorted(ranks["coordinate"] for ranks in found) == [0, 0, 1, 1]
