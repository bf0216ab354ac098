"""Searches for the fastest way to run a recipe. Most use the search's own arithmetic in place of estimates."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.fake_cuda import why_not
from harness.planned import FakeComposer
from harness.third_party import install
from titan_core.api import Config, UserError
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.plugins.registry import Components
from titan_simulate.cli.plan import arguments
from titan_simulate.cli.plan_result import conclude, write_recipe
from titan_simulate.cli.planned import as_json
from titan_simulate.hardware.machine import Machine
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.candidates import Candidate, Space
from titan_simulate.plan.kinds import GLOBAL_BATCH, LOCAL_BATCH
from titan_simulate.plan.result import CLOSE, INTERRUPTED, Plan, describe
from titan_simulate.plan.search import Search
from titan_testing.jobs import make_job

SMALL = {"training.global_batch_size": 32, "training.seq_len": 64}


@dataclass(frozen=True)
class _Figures:
    peak_gib: float
    step_seconds: float
    tokens_per_second_per_gpu: float = 1.0
    mfu: float = 0.5


@dataclass
class _Planner:
    """A search in which a formula stands for traces and estimates."""

    recipe: str
    gpus: int
    settings: dict[str, Any]
    allow_precision: bool = False
    activations: float = 1.0
    """Memory of activations, relative to what is composed."""

    def __post_init__(self) -> None:
        self.given = self.job(())
        self.space = Space(
            self.given, self.gpus, self.given.batch.global_size, set(self.settings), self.allow_precision
        )  # fmt: skip
        self.composer = FakeComposer(self.gpus)
        self.estimated: list[AssembledJob] = []

    def job(self, more: Sequence[Override]) -> AssembledJob:
        return make_job(self.recipe, {**self.settings, **{one.key: one.text for one in more}}, self.gpus, missing_ok=True)

    def run(
        self,
        memory_gib: float = 79.0,
        finalists: int = 4,
        deadline: float | None = None,
        report: Callable[[str], None] = lambda text: None,
        interrupt_at: int | None = None,
        fails: bool = False,
    ) -> Plan:
        machine: Machine = read_machine("h100").model_copy(update={"memory_gib": memory_gib})

        def estimate(overrides: Sequence[Override]) -> _Figures:
            if len(self.estimated) == interrupt_at:
                raise KeyboardInterrupt
            if fails:
                raise NotImplementedError("an operator without a fake kernel")
            job = self.job(overrides)  # a finalist is a valid job
            self.estimated.append(job)
            of_kind = self.space.kind_of(job)
            composed = self.composer.composition(self.space.candidate(job, of_kind, of_kind))
            more = (self.activations - 1) * composed.memory["activations"] / 2**30
            return _Figures(composed.peak_gib + more, composed.step_seconds)

        search = Search(self.space, self.composer, machine, self.job)
        return search.run(estimate, finalists, self.given, deadline, report)


def test_the_fastest_candidates_that_fit_win_and_the_others_have_reasons() -> None:
    planner = _Planner("llama3_debug", 8, SMALL)
    plan = planner.run()
    assert 2 <= len(plan.best) <= 4  # few kinds can win
    times = [one.figures.step_seconds for one in plan.best]
    assert times == sorted(times)
    # 8 = 2**3 over five dimensions, without 8 stages of 6 blocks: 34 meshes, in 15 of which the ranks that divide the
    # sequence may exchange heads, in groups of 2 to all of them.
    assert plan.meshes == 34 + 10 * 1 + 4 * 2 + 1 * 3
    lost = sum(one.count for one in plan.losers)
    assert lost + len(plan.best) in (plan.candidates, plan.candidates + 1)  # the recipe may be a candidate itself
    assert "pipeline bubble" in {one.why for one in plan.losers}
    for job in planner.estimated:
        assert job.batch.global_size == 32
        assert job.mesh.world_size == 8


def test_what_the_user_sets_stays() -> None:
    settings = {**SMALL, "parallelism.tensor_parallel_degree": 2, "activation_checkpoint.mode": "selective"}
    planner = _Planner("llama3_debug", 8, settings)
    planner.run()
    assert {job.mesh.degree("tp") for job in planner.estimated} == {2}
    assert {job.config.value("activation_checkpoint.mode") for job in planner.estimated} == {"selective"}


@pytest.mark.full
def test_numbers_change_on_request_only() -> None:
    settings = {**SMALL, "training.mixed_precision_param": "bfloat16", "parallelism.pipeline_parallel_degree": 1}
    kept = _Planner("llama3_debug", 2, settings)
    kept.run(finalists=8)
    assert not any(job.config.value("float8.enable") for job in kept.estimated)
    free = _Planner("llama3_debug", 2, settings, allow_precision=True)
    free.run(finalists=8)
    assert any(job.config.value("float8.enable") for job in free.estimated)


def test_if_nothing_fits_the_nearest_miss_is_named() -> None:
    plan = _Planner("llama3_debug", 4, SMALL).run(memory_gib=0.5)
    assert plan.best == []
    assert plan.nearest is not None
    candidate, peak = plan.nearest
    assert peak > 0.5
    assert candidate.mesh.world_size == 4 and str(candidate.mesh) in describe(candidate)


def test_what_fits_but_cannot_be_simulated_is_no_near_miss() -> None:
    """It was "-80000204800 B too large"."""
    settings = {**SMALL, "parallelism.pipeline_parallel_degree": 1, "parallelism.context_parallel_degree": 1}
    plan = _Planner("llama3_debug", 2, settings).run(fails=True)
    assert plan.best == plan.too_large == [] and plan.nearest is None
    assert any("an operator without a fake kernel" in one.detail for one in plan.losers)


@pytest.mark.full
def test_estimates_correct_what_is_composed() -> None:
    """Activations take four times what is composed: estimates teach that, until what is left fits."""
    said: list[str] = []
    plan = _Planner("llama3_debug", 8, SMALL, activations=4.0).run(memory_gib=79.0, report=said.append)
    assert plan.best and plan.too_large
    assert any("kinds of blocks traced" in one and "win; " in one for one in said)
    assert all(one.figures.peak_gib <= 79.0 for one in plan.best)


def test_kinds_that_cannot_win_are_not_traced() -> None:
    """The formula's division of a block costs more than it saves, and whole blocks fit."""
    planner = _Planner("llama3_debug", 8, {**SMALL, "compile.enable": "true"})
    plan = planner.run()
    assert plan.unproved == 0.0 and plan.winner is not None and 0 < plan.traced < plan.kinds / 2
    assert plan.winner.figures.step_seconds == pytest.approx(
        min(planner.composer.composition(one).step_seconds for one in _candidates(planner) if _fits(planner, one)), rel=CLOSE
    )


def _candidates(planner: _Planner) -> list[Candidate]:
    space, found = planner.space, []
    for degrees in space.meshes(()):
        for local in space.local_batches(degrees):
            values = {**degrees, GLOBAL_BATCH: space.global_batch, LOCAL_BATCH: local}
            found += [one for one in space.variants(space.assumed(degrees, local), values) if isinstance(one, Candidate)]
    return found


def _fits(planner: _Planner, one: Candidate) -> bool:
    return planner.composer.composition(one).peak_gib <= 79.0


@pytest.mark.full
def test_the_written_recipe_passes_config_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planner = _Planner("llama3_debug", 8, SMALL)
    plan = planner.run()
    best = next(one for one in plan.best if not one.candidate.given)
    overrides = [*(Override(key, str(value)) for key, value in SMALL.items()), *best.candidate.overrides]
    config, _ = load_config("llama3_debug", overrides, Components.from_installed())
    file = tmp_path / "planned.toml"
    write_recipe(file, config, "titan plan", "fast")
    assert main(["config", "check", str(file)]) == 0
    assert "valid for 8 process(es)" in capsys.readouterr().out
    job = make_job(str(file), world_size=8)
    assert job.mesh.degrees == best.candidate.mesh.degrees
    assert job.batch.global_size == 32
    assert job.dump_folder == "outputs/planned"
    with pytest.raises(UserError, match="cannot be written"):
        write_recipe(file, config, "titan plan", "fast")


def test_the_written_recipe_has_the_stages(tmp_path: Path) -> None:
    config, _ = load_config("llama3_debug_stages", [], Components.from_installed())
    write_recipe(tmp_path / "planned.toml", config, "titan plan", "fast")
    planned, _ = load_config(str(tmp_path / "planned.toml"), [], Components.from_installed())
    assert [stage.table for stage in planned.stages] == [stage.table for stage in config.stages] != []


def test_every_switch_of_a_parallelism_is_varied_and_each_candidate_is_a_valid_job() -> None:
    planner = _Planner("llama3_debug", 8, SMALL)
    degrees = {f"parallelism.{name}_parallel_degree": 2 for name in ("pipeline", "tensor", "context")}
    degrees |= {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": 1}
    values = {**degrees, "training.global_batch_size": 32, "training.local_batch_size": 32}
    found = list(planner.space.variants(planner.space.assumed(degrees, 32), values))
    valid = [one for one in found if isinstance(one, Candidate)]
    tried: dict[str, set[Any]] = defaultdict(set)
    for one in valid:
        for key, value in one.values.items():
            tried[key].add(value)
    assert tried["compile.enable"] == {True, False}
    assert tried["parallelism.enable_async_tensor_parallel"] == {True, False}  # whenever blocks are compiled
    assert tried["parallelism.context_parallel_rotate_method"] == {"allgather", "alltoall"}
    assert len(tried["parallelism.pipeline_parallel_layers_per_stage"]) > 1
    for one in valid[:: max(1, len(valid) // 8)]:
        planner.job(one.overrides)
    split = [one for one in valid if "ZeroBubble" in one.values["parallelism.pipeline_parallel_schedule"]]
    assert split and not any(one.values["compile.enable"] for one in split)


def test_a_search_that_stops_early_has_no_winner() -> None:
    """970 tokens/s were written as the fastest, where waiting found 1,347."""
    settings = {**SMALL, "parallelism.pipeline_parallel_degree": 1, "parallelism.context_parallel_degree": 1}
    whole = _Planner("llama3_debug", 4, settings).run()
    assert whole.stopped is None and whole.winner is whole.best[0] and whole.estimated == whole.wanted == 4
    ended = _Planner("llama3_debug", 4, settings).run(interrupt_at=2)
    assert (ended.stopped, ended.winner, ended.estimated) == (INTERRUPTED, None, 2)
    assert not ended.unexpected and ended.unproved == 1.0
    assert [one.figures.step_seconds for one in ended.best] == sorted(one.figures.step_seconds for one in ended.best)
    at_once = _Planner("llama3_debug", 4, settings).run(interrupt_at=0)
    assert (at_once.stopped, at_once.winner, at_once.nearest) == (INTERRUPTED, None, None)


def test_a_time_limit_leaves_kinds_unproved() -> None:
    """The recipe fits, and other kinds are faster."""
    settings = {**SMALL, "training.mixed_precision_param": "bfloat16"}
    late, whole = (_Planner("llama3_debug", 8, settings, True).run(1e5, deadline=one) for one in (0.0, None))
    assert late.stopped is whole.stopped is None and late.winner is not None
    assert late.unproved > 0.0 == whole.unproved and late.traced < whole.traced


@pytest.mark.full
def test_a_search_says_how_far_it_is() -> None:
    said: list[str] = []
    _Planner("llama3_debug", 8, SMALL).run(finalists=3, report=said.append)
    assert "kinds of blocks; the recipe" in said[0] and "kinds of blocks; their choices" in said[1]
    assert any("of 3 estimated; fastest so far 1 tokens/s per GPU" in one for one in said)


def _conclude(folder: Path, plan: Plan, planner: _Planner, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, bool]:
    """Return the exit status, the output, and whether there is a recipe."""
    out = folder / f"{plan.stopped}.toml"
    parser = argparse.ArgumentParser()
    arguments(parser)
    options = parser.parse_args(["llama3_debug", "--gpus", "4", "--out", str(out)])

    def config(overrides: Sequence[Override]) -> Config:
        given = [*(Override(key, str(value)) for key, value in planner.settings.items()), *overrides]
        return load_config("llama3_debug", given, Components.from_installed())[0]

    context = cast(Any, SimpleNamespace(arguments=options, config=config, override_arguments=[]))
    status = conclude(context, plan, read_machine("h100"))
    return status, capsys.readouterr().out, out.exists()


@pytest.mark.full
def test_only_a_complete_comparison_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**SMALL, "parallelism.pipeline_parallel_degree": 1}
    planner = _Planner("llama3_debug", 4, settings)
    status, text, written = _conclude(tmp_path, planner.run(), planner, capsys)
    assert (status, written) == (0, True)
    assert "candidates compared, 4 of them by estimate" in text and "kinds of blocks: " in text
    assert "compared, 4 of them by estimate; " in (tmp_path / "None.toml").read_text()
    for options, expected in (({"interrupt_at": 2}, 130),):
        planner = _Planner("llama3_debug", 4, settings)
        plan = planner.run(**options)  # type: ignore[arg-type]
        status, text, written = _conclude(tmp_path, plan, planner, capsys)
        assert (status, written) == (expected, False)
        assert f"NOT COMPLETE: {plan.stopped} ended the comparison after {plan.estimated} of 4 estimates" in text
        assert "is not written" in text and "wrote" not in text
        assert as_json(plan, read_machine("h100"), 5)["complete"] is False


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("examples")
    install(folder, "titan-model-moe", "titan-zones", "titan-local-sgd")
    return str(folder)


_SEARCH = """
import json, sys
from integration.test_plan import _Planner
planner = _Planner(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
routers = planner.given.model.layout.routers.values()
meshes = list(planner.space.meshes(sorted({router.experts for router in routers})))
plan = planner.run(finalists=6)
jobs = [{**job.mesh.degrees, **job.mesh.view_degrees} for job in planner.estimated]
losers = [one.why for one in plan.losers]
print(json.dumps({"meshes": meshes, "jobs": jobs, "losers": losers, "fits": len(plan.best)}))
"""


def _search_with(site: str, recipe: str, gpus: int, settings: dict[str, object]) -> dict[str, Any]:
    """Search in a process of its own, in which the packages in ``site`` are installed."""
    import os

    path = os.pathsep.join([site, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _SEARCH, recipe, str(gpus), json.dumps(settings)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_third_parties_dimensions_and_views_are_searched(examples: str) -> None:
    """Experts are divided over the degrees that divide their number (8), zones are data parallelism, and islands, which
    train other weights, stay as they are."""
    settings: dict[str, object] = {"model.flavor": "small", "training.global_batch_size": 16}
    found = _search_with(examples, "moe", 4, settings)
    degrees = {key: {mesh[key] for mesh in found["meshes"]} for key in found["meshes"][0]}
    assert degrees["parallelism.expert_parallel_degree"] == {1, 2, 4}
    assert degrees["zones.count"] == {1, 2, 4}
    assert degrees["local_sgd.islands"] == {1}
    assert found["fits"] > 1
    fixed = {**settings, "parallelism.expert_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 4}
    assert {job["ep"] for job in _search_with(examples, "moe", 4, fixed)["jobs"]} == {2}


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "is not a whole number from 1"),
        (["--gpus", "8", "--device", "h1000"], "no machine has this name"),
        (["--gpus", "8", "--out", "/dev/null"], "already exists"),
        (["--gpus", "8", "--out", "/dev/null/planned.toml"], "--out /dev/null/planned.toml: cannot be written"),
        (["--gpus", "8", "--headroom", "5"], "is not a share from 0 to 0.9"),
        (["--gpus", "7", "--parallelism.tensor_parallel_degree", "2"], "no mesh has this number of ranks"),
    ],
)
def test_mistakes_have_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["plan", "llama3_debug", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.fake_cuda
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_real_search_writes_the_recipe_of_its_best(tmp_path: Path) -> None:
    arguments = ["llama3_debug", "--gpus", "4", "--finalists", "2", "--out", "planned.toml"]
    command = [sys.executable, "-m", "titan_core", "plan", *arguments, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    plan = json.loads(done.stdout)
    assert plan["best"][0]["peak_gib"] <= plan["memory_gib"] == pytest.approx(0.95 * read_machine("h100").memory_gib)
    assert plan["best"][0]["tokens_per_second_per_gpu"] > 0
    job = make_job(str(tmp_path / "planned.toml"), world_size=4)
    assert dict(job.mesh.degrees) == {name: plan["best"][0]["mesh"][name] for name in job.mesh.degrees}
