"""Qwen3 with experts on meshes. Its files, and the same architecture of titan-models-hf: see ``test_qwen3.py``.

``uv run pytest -m "full or not full" tests/integration/test_qwen3_moe.py`` runs all rows of the table."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import own_dispatch
from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job, run_job, run_recipe
from harness.meshes import CASES, FAST, Case, require_equal, run_in
from titan_core.api import UserError
from titan_core.cli.main import main

ARGS = {
    "qwen3": "n_experts = 4, expert_dim = 32",
    "deepseek": (
        'n_experts = 4, expert_dim = 32, n_dense_layers = 1, n_shared_experts = 1, scoring = "sigmoid", choice_bias = true,'
        " n_groups = 2, n_chosen_groups = 2, weight_scale = 1.5"
    ),
}
"""Arguments of the experts; the others are small, as in the tables of other models."""
EP = "parallelism.expert_parallel_degree"
QUICK = ("TP 2",)
FULL = ("FSDP 2", "TP 2, no SP", "PP 2, 1F1B", "PP 2, ZBVZeroBubble", "CP 2", "FSDP x TP", "FSDP x PP", "TP x CP")
BY_NAME = {case.name: case for case in CASES}
EP_CASES = (Case("EP 2", 2, {EP: 2}), Case("EP 2 x TP 2", 4, {EP: 2, **BY_NAME["TP 2"].overrides}))
Reference = Callable[[str], RunRecord]


def settings(variant: str) -> dict[str, object]:
    args = f"{{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100, {ARGS[variant]}}}"
    return {**FAST, "training.steps": 2, "model.args": args}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The record of one device, by the arguments of the experts."""

    @functools.cache
    def trained(variant: str) -> RunRecord:
        folder = str(tmp_path_factory.mktemp(variant))
        return gloo.run(1, run_in, folder, settings(variant), True, "qwen3_moe_tiny")[0]

    return trained


def rows() -> list[object]:
    cases = [BY_NAME[name] for name in (*QUICK, *FULL)] + list(EP_CASES)
    return [
        pytest.param(
            case,
            variant,
            id=f"{case.name}, {variant}",
            marks=() if case.name in QUICK and variant == "deepseek" else pytest.mark.full,
        )
        for case in cases
        for variant in ARGS
    ]


@pytest.mark.parametrize(("case", "variant"), rows())
def test_a_mesh_trains_as_one_device(
    gloo: GlooPool, one_device: Reference, tmp_path: Path, case: Case, variant: str
) -> None:
    overrides = {**settings(variant), **case.overrides}
    require_equal(gloo.run(case.ranks, run_in, str(tmp_path), overrides, True, "qwen3_moe_tiny"), one_device(variant))


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.full)])
def test_recomputation_changes_nothing(gloo: GlooPool, one_device: Reference, tmp_path: Path, mode: str) -> None:
    overrides = {**settings("deepseek"), "activation_checkpoint.mode": mode}
    (record,) = gloo.run(1, run_in, str(tmp_path), overrides, True, "qwen3_moe_tiny")
    assert record.losses == one_device("deepseek").losses
    assert record.grad_norms == one_device("deepseek").grad_norms


GRAPH = {
    "compile.enable": "true", "compile.backend": "aot_eager", "compile.fullgraph": "true", "experts.metrics": "false",
}  # fmt: skip
BF16: dict[str, object] = {"training.mixed_precision_param": "bfloat16"}
COMPILED = {"one device": (1, {}), "EP 2": (2, {EP: 2}), "EP 2 x PP 2": (4, {EP: 2, **BY_NAME["PP 2, 1F1B"].overrides})}


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
        overrides = {**settings("deepseek"), EP: 2, "parallelism.expert_parallel_dispatch": dispatch}
        return run_in(folder, overrides, True, "qwen3_moe_tiny"), found


@pytest.mark.parametrize("dispatch", [pytest.param("alltoall", marks=pytest.mark.full), "device"])
def test_shared_experts_compute_while_rows_are_on_their_way(gloo: GlooPool, tmp_path: Path, dispatch: str) -> None:
    (run, beside), (in_turn, _) = (gloo.run(2, trained_beside, str(tmp_path), dispatch, turn)[0] for turn in (False, True))
    assert beside and beside == [True, False] * (len(beside) // 2)  # not the way back
    assert run.losses == in_turn.losses and run.grad_norms == in_turn.grad_norms


def trained_with_own_dispatch(folder: str) -> tuple[RunRecord, list[int]]:
    os.chdir(folder)
    job = make_job("qwen3_moe_tiny", {**settings("deepseek"), EP: 2, "parallelism.expert_parallel_dispatch": "device"})
    own_dispatch.SENT.clear()
    return run_job(replace(job, transforms=(own_dispatch.OWN_DISPATCH, *job.transforms))), list(own_dispatch.SENT)


@pytest.mark.full
def test_another_plugin_brings_its_exchange_of_rows(gloo: GlooPool, one_device: Reference, tmp_path: Path) -> None:
    for record, rows in gloo.run(2, trained_with_own_dispatch, str(tmp_path)):
        assert record.losses == pytest.approx(one_device("deepseek").losses, rel=1e-6)
        assert len(rows) >= 2 * 3 and set(rows) == {rows[0]}


@pytest.mark.full
def test_a_block_whose_host_never_waits_is_one_graph(gloo: GlooPool, one_device: Reference, tmp_path: Path) -> None:
    """Nor does FSDP gather experts within it, here for want of other data."""
    job = {**settings("deepseek"), EP: 2, **BY_NAME["TP 2"].overrides, **GRAPH}
    waits = {key: value for key, value in job.items() if key != "compile.fullgraph"}  # with the other dispatch
    job["parallelism.expert_parallel_dispatch"] = "device"
    records = [gloo.run(2, run_in, str(tmp_path), one, True, "qwen3_moe_tiny") for one in (job, waits)]
    for record in (*records[0], *records[1]):
        assert record.losses == pytest.approx(one_device("deepseek").losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one_device("deepseek").grad_norms, rel=1e-5)


def interruption(folder: str, overrides: dict[str, object]) -> str:
    os.chdir(folder)
    with pytest.raises(UserError) as caught:
        run_recipe("qwen3_moe_tiny", {**settings("deepseek"), **overrides})
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
    gloo: GlooPool, one_device: Reference, tmp_path: Path, ranks: int, overrides: dict[str, object], why: str
) -> None:
    refused = gloo.run(ranks, interruption, str(tmp_path), {**GRAPH, **overrides})[0]
    assert refused.endswith(f"compile.fullgraph = true: {why}, which interrupts its graph; remove the key")
    by_default = {key: value for key, value in {**GRAPH, **overrides}.items() if key != "compile.fullgraph"}
    record = gloo.run(ranks, run_in, str(tmp_path), {**settings("deepseek"), **by_default}, True, "qwen3_moe_tiny")[0]
    assert record.losses == pytest.approx(one_device("deepseek").losses, rel=1e-2 if overrides is BF16 else 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", COMPILED)
def test_compiled_blocks_are_interrupted_to_count(
    gloo: GlooPool, one_device: Reference, tmp_path: Path, mesh: str, mode: str
) -> None:
    """Also where experts are gathered within a block that is recomputed."""
    ranks, degrees = COMPILED[mesh]
    compiled = {"compile.enable": "true", "compile.backend": "aot_eager", "activation_checkpoint.mode": mode}
    for record in gloo.run(
        ranks, run_in, str(tmp_path), {**settings("deepseek"), **degrees, **compiled}, True, "qwen3_moe_tiny"
    ):
        assert record.losses == pytest.approx(one_device("deepseek").losses, rel=1e-6)
        assert record.statistics == one_device("deepseek").statistics


def test_a_model_that_the_library_lacks_is_refused_before_anything_is_written(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_ckpt.foreign.exporting._exported", lambda *_: pytest.fail("a tensor is converted"))
    saved = {**settings("deepseek"), "training.steps": 1, "checkpoint.enable": "true", "job.dump_folder": "trained"}
    run_recipe("qwen3_moe_tiny", saved)
    assert main(["checkpoint", "convert", "trained", "exported"]) == 2
    assert "model.args.n_shared_experts: is 1, and Qwen3MoeForCausalLM has 0" in capsys.readouterr().err
    assert not [*Path().glob("*exported*/*")]
