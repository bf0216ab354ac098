"""Qwen3 with experts: what is computed beside exchanges, and compiled. Its runs on meshes: ``test_inherited_suites.py``; its
files, and the same architecture of titan-models-hf: ``test_qwen3.py``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import own_dispatch
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_job, run_recipe
from titan_testing.meshes import EP, FAST, PP, SCHEDULE, TP, run_in

ARGS = (
    "dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100, n_experts = 4, expert_dim = 32, n_dense_layers = 1,"
    ' n_shared_experts = 1, scoring = "sigmoid", choice_bias = true, n_groups = 2, n_chosen_groups = 2, weight_scale = 1.5'
)
JOB: dict[str, object] = {**FAST, "training.steps": 2, "model.args": f"{{{ARGS}}}"}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), JOB, True, "qwen3_moe_tiny")[0]


GRAPH = {
    "compile.enable": "true", "compile.backend": "aot_eager", "compile.fullgraph": "true", "experts.metrics": "false",
}  # fmt: skip
BF16: dict[str, object] = {"training.mixed_precision_param": "bfloat16"}
COMPILED = {"one device": (1, {}), "EP 2": (2, {EP: 2}), "EP 2 x PP 2": (4, {EP: 2, PP: 2, SCHEDULE: "1F1B"})}


def trained_beside(folder: str, dispatch: str, one_after_the_other: bool) -> tuple[RunRecord, list[bool]]:
    """Train, and return also whether something was computed beside each exchange of rows."""
    from titan_experts import dispatch as dispatches

    exchange, found = dispatches.exchange_rows, list[bool]()

    def exchanged(*arguments: Any) -> Tensor:
        *exchanged, beside = arguments if len(arguments) == 5 else (*arguments, None)
        found.append(beside is not None)
        if not one_after_the_other or beside is None:
            return exchange(*exchanged, beside)
        result = exchange(*exchanged)
        beside()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatches, "exchange_rows", exchanged)
        overrides = {**JOB, EP: 2, "parallelism.expert_parallel_dispatch": dispatch}
        return run_in(folder, overrides, True, "qwen3_moe_tiny"), found


@pytest.mark.parametrize("dispatch", [pytest.param("alltoall", marks=pytest.mark.full), "device"])
def test_shared_experts_compute_while_rows_are_on_their_way(gloo: GlooPool, tmp_path: Path, dispatch: str) -> None:
    (run, beside), (in_turn, _) = (gloo.run(2, trained_beside, str(tmp_path), dispatch, turn)[0] for turn in (False, True))
    assert beside and beside == [True, False] * (len(beside) // 2)  # not the way back
    assert run.losses == in_turn.losses and run.grad_norms == in_turn.grad_norms


def trained_with_own_dispatch(folder: str) -> tuple[RunRecord, list[int]]:
    os.chdir(folder)
    job = make_job("qwen3_moe_tiny", {**JOB, EP: 2, "parallelism.expert_parallel_dispatch": "device"})
    own_dispatch.SENT.clear()
    return run_job(replace(job, transforms=(own_dispatch.OWN_DISPATCH, *job.transforms))), list(own_dispatch.SENT)


@pytest.mark.full
def test_another_plugin_brings_its_exchange_of_rows(gloo: GlooPool, one_device: RunRecord, tmp_path: Path) -> None:
    for record, rows in gloo.run(2, trained_with_own_dispatch, str(tmp_path)):
        assert record.losses == pytest.approx(one_device.losses, rel=1e-6)
        assert len(rows) >= 2 * 3 and set(rows) == {rows[0]}


@pytest.mark.full
def test_a_block_whose_host_never_waits_is_one_graph(gloo: GlooPool, one_device: RunRecord, tmp_path: Path) -> None:
    """Nor does FSDP gather experts within it, here for want of other data."""
    job = {**JOB, EP: 2, TP: 2, **GRAPH}
    waits = {key: value for key, value in job.items() if key != "compile.fullgraph"}  # with the other dispatch
    job["parallelism.expert_parallel_dispatch"] = "device"
    records = [gloo.run(2, run_in, str(tmp_path), one, True, "qwen3_moe_tiny") for one in (job, waits)]
    for record in (*records[0], *records[1]):
        assert record.losses == pytest.approx(one_device.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one_device.grad_norms, rel=1e-5)


def interruption(folder: str, overrides: dict[str, object]) -> str:
    os.chdir(folder)
    with pytest.raises(UserError) as caught:
        run_recipe("qwen3_moe_tiny", {**JOB, **overrides})
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "overrides", "why"),
    [
        (2, {EP: 2}, "data parallelism gathers modules within a block (layers.1.feed_forward.experts, ...)"),
        (1, BF16, "data parallelism gathers modules within a block (layers.1.feed_forward.router, ...)"),
        (1, {"experts.metrics": "true"}, "modules count or add losses (experts_rows)"),
    ],
)
def test_a_graph_that_is_interrupted_is_refused_or_not_demanded(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, overrides: dict[str, object], why: str
) -> None:
    refused = gloo.run(ranks, interruption, str(tmp_path), {**GRAPH, **overrides})[0]
    assert refused.endswith(f"compile.fullgraph = true: {why}, which interrupts its graph; remove the key")
    by_default = {key: value for key, value in {**GRAPH, **overrides}.items() if key != "compile.fullgraph"}
    record = gloo.run(ranks, run_in, str(tmp_path), {**JOB, **by_default}, True, "qwen3_moe_tiny")[0]
    assert record.losses == pytest.approx(one_device.losses, rel=1e-2 if overrides is BF16 else 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", COMPILED)
def test_compiled_blocks_are_interrupted_to_count(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, mesh: str, mode: str
) -> None:
    """Also where experts are gathered within a block that is recomputed."""
    ranks, degrees = COMPILED[mesh]
    compiled = {"compile.enable": "true", "compile.backend": "aot_eager", "activation_checkpoint.mode": mode}
    for record in gloo.run(ranks, run_in, str(tmp_path), {**JOB, **degrees, **compiled}, True, "qwen3_moe_tiny"):
        assert record.losses == pytest.approx(one_device.losses, rel=1e-6)
        assert record.statistics == one_device.statistics


def test_a_model_that_the_library_lacks_is_refused_before_anything_is_written(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_ckpt.foreign.exporting._exported", lambda *_: pytest.fail("a tensor is converted"))
    saved = {**JOB, "training.steps": 1, "checkpoint.enable": "true", "job.dump_folder": "trained"}
    run_recipe("qwen3_moe_tiny", saved)
    assert main(["checkpoint", "convert", "trained", "exported"]) == 2
    assert "model.args.n_shared_experts: is 1, and Qwen3MoeForCausalLM has 0" in capsys.readouterr().err
    assert not [*Path().glob("*exported*/*")]
