"""A model with windows, capped scores and sinks trains on any mesh as on one device, with and without document masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import CP, FAST, PP, SCHEDULE, TP, require_equal, run_in
from harness.quick import rows

ARGS = "{{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 100, {}}}"
OPTIONS: dict[str, dict[str, object]] = {
    "window": {"model.args": ARGS.format("window = 7")},
    "cap": {"model.args": ARGS.format("softcap = 0.05")},
    "sinks": {"model.args": ARGS.format("sinks = true")},
    "all": {"model.args": ARGS.format("window = 7, softcap = 0.05, sinks = true")},
    "all, documents": {
        "model.args": ARGS.format("window = 7, softcap = 0.05, sinks = true"),
        "data.document_mask": "true",
        "training.dataset": "letters",
        "training.dataset_path": "/".join(str(5 + number * 13 % 60) for number in range(200)),
    },
}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "TP 2, no SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "CP 2": (2, {CP: 2}),
    "CP 4, selective": (4, {CP: 4, "activation_checkpoint.mode": "selective"}),
    "PP 2": (2, {PP: 2, SCHEDULE: "1F1B"}),
    "TP x CP, full": (4, {TP: 2, CP: 2, "activation_checkpoint.mode": "full"}),
    "CP 2, compiled": (2, {CP: 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
}
QUICK = ("CP 2 with window", "TP x CP, full with all, documents")
FULL = (
    *(f"{mesh} with all, documents" for mesh in MESHES if mesh != "TP x CP, full"),
    "TP 2 with sinks",
    "CP 4, selective with cap",
    "CP 4, selective with window",
    "PP 2 with all",
)
Reference = Callable[[str], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The record of one device, by the name of the options."""

    def run(options: str) -> RunRecord:
        return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), {**FAST, **OPTIONS[options]})[0]

    return functools.cache(run)


@pytest.mark.parametrize("case", rows([f"{mesh} with {options}" for mesh in MESHES for options in OPTIONS], QUICK, FULL))
def test_it_trains_as_on_one_device(gloo: GlooPool, one_device: Reference, tmp_path: Path, case: str) -> None:
    mesh, _, options = case.partition(" with ")
    ranks, overrides = MESHES[mesh]
    require_equal(gloo.run(ranks, run_in, str(tmp_path), {**FAST, **OPTIONS[options], **overrides}), one_device(options))


@pytest.mark.full
def test_each_option_changes_the_losses(one_device: Reference, gloo: GlooPool, tmp_path: Path) -> None:
    """Otherwise the comparison above could pass without it."""
    (plain,) = gloo.run(1, run_in, str(tmp_path), FAST)
    for options in ("window", "cap", "sinks"):
        assert one_device(options).losses[1:] != pytest.approx(plain.losses[1:], rel=1e-6)
