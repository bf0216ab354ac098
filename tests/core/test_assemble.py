"""Assembly: sizes that fit each other, components by name, transforms in order."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from titan_core.api import MeshDim, MeshView, Model, Problem, Ref, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.parallel.mesh import dims_in_order
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.job.mesh_plan import plan_mesh
from titan_core.plugins.registry import Components
from titan_testing.jobs import make_job

REGISTRY = Components.from_installed()
ALL = [
    "parallelism.pipeline_parallel_degree", "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree", "parallelism.context_parallel_degree", "parallelism.tensor_parallel_degree",
]  # fmt: skip


def config_with(**overrides: object):  # type: ignore[no-untyped-def]
    given = [Override(key.replace("__", "."), str(value)) for key, value in overrides.items()]
    return load_config("tiny", given, REGISTRY)[0]


@given(st.lists(st.integers(1, 4), min_size=5, max_size=5), st.booleans())
def test_the_mesh_holds_every_rank_once(degrees: list[int], rest: bool) -> None:
    values: dict[str, object] = {key.replace(".", "__"): degree for key, degree in zip(ALL, degrees, strict=True)}
    world = 1
    for degree in degrees:
        world *= degree
    if rest:
        values["parallelism__data_parallel_shard_degree"] = -1
    plan = plan_mesh(config_with(**values), [], world)
    assert plan.world_size == world
    assert list(plan.degrees) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert plan.batch_degree == degrees[1] * degrees[2]


def test_degrees_that_do_not_fit_the_world_are_reported_with_a_fix() -> None:
    with pytest.raises(UserError, match=r"multiply to 4 .* the world has 6 process\(es\); start a multiple of 4 processes"):
        plan_mesh(config_with(parallelism__tensor_parallel_degree=4), [], 6)
    with pytest.raises(UserError, match=r"the world has 8 process\(es\); set parallelism\.data_parallel_shard_degree = -1"):
        plan_mesh(config_with(parallelism__data_parallel_shard_degree=4), [], 8)


def test_a_third_partys_dimension_is_placed_in_order() -> None:
    mine = MeshDim("expert", "moe.degree", "weights", before="tp")
    assert [dim.name for dim in dims_in_order([mine, mine])] == ["pp", "dp_replicate", "dp_shard", "cp", "expert", "tp"]
    with pytest.raises(UserError, match="two plugins define it"):
        dims_in_order([mine, MeshDim("expert", "other.degree", "batch")])
    with pytest.raises(UserError, match=r"mesh dimension 'mine': before = 'pq' is no standard dimension; .* one of pp, dp"):
        dims_in_order([MeshDim("mine", "mine.degree", "batch", before="pq")])


def test_any_dimension_may_take_the_remaining_ranks() -> None:
    mine = MeshDim("mine", "mine.degree", "batch", before="cp", takes_rest=True)
    degrees = {"mine.degree": -1, "parallelism.tensor_parallel_degree": 2}
    problem = lambda key, why, fix: Problem(key, why, fix)  # noqa: E731
    config: Any = SimpleNamespace(value=lambda key: degrees.get(key, 1), problem=problem, where=lambda key, value: key)
    plan = plan_mesh(config, [mine], 8)
    assert {name: degree for name, degree in plan.degrees.items() if degree > 1} == {"mine": 4, "tp": 2}
    view = MeshView("ep", "ep.degree", borrows=("mine", "cp"))
    degrees["ep.degree"] = 3
    assert plan_mesh(config, [mine], None, [view]).degree("mine") == 3
    with pytest.raises(UserError, match=r"tensor_parallel_degree.*start a multiple of 2 processes"):
        plan_mesh(config, [mine], 7)
    degrees["parallelism.data_parallel_shard_degree"] = -1
    with pytest.raises(UserError, match=r"mine.degree: only one .* and parallelism.data_parallel_shard_degree is -1 too"):
        plan_mesh(config, [mine], 8)


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.seq_len": 4096}, r"training\.seq_len = 4096: the model accepts at most 2048 tokens"),
        ({"model.args.vocab_size": 100}, r"has 258 tokens, but the model's has only 100"),
        ({"model.flavor": "9B"}, r"model\.flavor = \"9B\": model 'tiny' has no such flavor; available: debug"),
        ({"model.name": "tinny"}, r"no installed plugin provides this model; did you mean 'tiny'"),
        ({"metrics.log_frequency": 2}, r"unknown key; did you mean 'log_freq'"),
        ({"plugins.disable": "norm"}, r'write a list, such as \["a", "b"\]'),
        ({"model.args.n_layer": 3}, r"model\.args\.n_layer = 3: unknown key; did you mean 'n_layers'"),
        ({"optimizer.name": "SGD"}, r"no installed plugin provides this optimizer"),
        (
            {"training.global_batch_size": 6},
            r"multiple of local_batch_size 4 x data-parallel degree 1 = 4; set training.global_batch_size = 4 or 8",
        ),
        ({"training.global_batch_size": 0}, r"training\.global_batch_size = 0: must be at least 1, or -1"),
        ({"data.logical_shards": 5}, r"data\.logical_shards = 5: must be a multiple"),
        ({"parallelism.data_parallel_shard_degree": 0}, r"must be at least 1, or -1"),
        ({"training.dataset_path": "here"}, r"dataset 'stdlib' takes no path"),
        ({"validation.enable": "true"}, r"validation\.dataset = \"\": is required; set it to the dataset to validate on"),
        ({"model.tokenizer_path": "here"}, r"tokenizer 'byte' takes no file"),
        ({"optimizer.param_groups": "[{pattern = 'a'}, {pattern = 'a'}]"}, r"contains a pattern twice"),
    ],
)
def test_invalid_jobs_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_job("tiny", overrides)


def test_a_degree_that_no_plugin_serves_is_refused() -> None:
    config, _ = load_config("tiny", [], REGISTRY)
    without = REGISTRY.without(["harness_parallel"])
    with pytest.raises(UserError, match="it takes the remaining 2 processes, but no plugin in use provides it"):
        assemble(config, without, 2)


def test_identity_covers_config_and_versions() -> None:
    job = make_job("tiny")
    assert job.digest() == make_job("tiny").digest()
    assert job.digest() != make_job("tiny", {"training.seed": 1}).digest()
    assert job.identity()["plugins"]["titan-harness:harness"] == "1.0"


def test_a_model_whose_code_cannot_be_imported_hides_no_other_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(REGISTRY.get(Model, "tiny"), define=Ref("no_such_module:define"))
    get = Components.get
    monkeypatch.setattr(Components, "get", lambda self, kind, name: broken if kind is Model else get(self, kind, name))
    with pytest.raises(UserError) as caught:
        assemble(config_with(training__dataset="nowhere"), REGISTRY, 1)
    places = " ".join(problem.where for problem in caught.value.problems)
    assert "no_such_module" in places
    assert "training.dataset" in places
