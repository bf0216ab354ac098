"""Every switch in combination with every other and with every kind of mesh: a pairwise covering array, each of whose rows
must train as on one device.

The quick run tests the first row, the full run every :data:`STRIDE`-th row, and
``uv run pytest -m long tests/integration/test_switches.py`` the others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs

from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import CP, DR, PP, SCHEDULE, TINY, TP, require_equal, run_in

SEED = 0
STRIDE = 16
COMMON: dict[str, object] = {**TINY, "training.steps": 2, "lr_scheduler.warmup_steps": 1}

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LOOPED = SCHEDULES[2:]
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "DDP 2": (2, {DR: 2}),
    "FSDP 2": (2, {}),
    "HSDP 2x2": (4, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "CP 2": (2, {CP: 2}),
    "FSDP x TP": (4, {TP: 2}),
    "FSDP x CP": (4, {CP: 2}),
    "TP x CP": (4, {TP: 2, CP: 2}),
    **{f"PP 2, {name}": (2, {PP: 2, SCHEDULE: name}) for name in SCHEDULES},
    **{f"FSDP x PP, {name}": (4, {PP: 2, SCHEDULE: name}) for name in ("1F1B", "Interleaved1F1B", *SPLIT_BACKWARD)},
    "TP x PP, 1F1B": (4, {TP: 2, PP: 2, SCHEDULE: "1F1B"}),
    "TP x PP, ZBVZeroBubble": (4, {TP: 2, PP: 2, SCHEDULE: "ZBVZeroBubble"}),
    "CP x PP, Interleaved1F1B": (4, {CP: 2, PP: 2, SCHEDULE: "Interleaved1F1B"}),
}
SWITCHES: dict[str, tuple[object, ...]] = {
    "training.enable_cpu_offload": ("false", "true"),
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
    "activation_checkpoint.mode": ("none", "full", "selective"),
    "activation_checkpoint.selective_ac_option": ("op", "2"),
    "activation_checkpoint.offload_share": (0.0, 1.0),
    "compile.enable": ("false", "true"),
    "parallelism.disable_sequence_parallel": ("false", "true"),
    "parallelism.disable_loss_parallel": ("false", "true"),
    "parallelism.pipeline_parallel_microbatch_size": (1, 2),
    "training.local_batch_size": (2, 4),
    "data.logical_shards": (0, 4),
    "data.document_mask": ("false", "true"),
    "training.max_norm": (1.0, 0.1, 0.0),
    "optimizer.implementation": ("fused", "foreach", "for-loop"),
    "optimizer.name": ("AdamW", "Adam"),
    "training.deterministic": ("false", "true"),
    "training.on_nan": ("stop", "skip", "ignore"),
    "model.args.tie_embeddings": ("false", "true"),
    "model.args.vocab_size": (288, 259),
    "validation.enable": ("false", "true"),
    "numerics.statistics_freq": (0, 1),
    "checkpoint.enable": ("false", "true"),
}
ONE_DEVICE = (
    "data.logical_shards",
    "data.document_mask",
    "training.max_norm",
    "optimizer.name",
    "model.args.tie_embeddings",
    "model.args.vocab_size",
)
"""Switches that change what is trained. The others change only how."""
HELPERS: dict[str, object] = {
    "validation.dataset": "stdlib", "validation.freq": 1, "validation.steps": 1, "compile.backend": "aot_eager",
    "checkpoint.interval": 1, "checkpoint.async_mode": "async",
}  # fmt: skip
NAMES = ("mesh", *SWITCHES)

Row = Mapping[str, object]


def is_refused(row: Row) -> bool:
    """Whether the documentation says that Titan refuses the row, as far as the row is known."""
    mesh = str(row["mesh"])
    split = mesh.endswith(SPLIT_BACKWARD) and row.get("compile.enable") == "true"
    # Two stages per rank have a block each, and the last block of a stage is not offloaded.
    return split or (mesh.endswith(LOOPED) and row.get("activation_checkpoint.offload_share") == 1.0)


def rows() -> list[dict[str, object]]:
    """Return the array: each pair of values of two factors that is not refused occurs in some row. The seed decides how the
    pairs are combined."""
    shuffle = random.Random(SEED)
    factors = [list(MESHES), *(list(values) for values in SWITCHES.values())]
    for values in factors:
        shuffle.shuffle(values)

    def is_valid(values: list[object]) -> bool:
        return not is_refused(dict(zip(NAMES, values, strict=False)))

    return [dict(zip(NAMES, values, strict=True)) for values in AllPairs(factors, filter_func=is_valid)]


def overrides_of(row: Row) -> dict[str, object]:
    switches = {name: value for name, value in row.items() if name != "mesh"}
    return {**COMMON, **HELPERS, **MESHES[str(row["mesh"])][1], **switches}


def table() -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{number}-{row['mesh']}",
            marks=pytest.mark.long if number % STRIDE else pytest.mark.full if number else (),
        )
        for number, row in enumerate(rows())
    ]


Reference = Callable[[tuple[object, ...]], RunRecord]


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Results on one device, by the values of :data:`ONE_DEVICE`."""

    def run(values: tuple[object, ...]) -> RunRecord:
        overrides = {**COMMON, **dict(zip(ONE_DEVICE, values, strict=True))}
        return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), overrides, True, "llama3_debug")[0]

    return functools.cache(run)


@pytest.mark.parametrize("row", table())
def test_switches_and_meshes_train_as_on_one_device(
    gloo: GlooPool, one_device: Reference, tmp_path: Path, row: dict[str, object]
) -> None:
    ranks = MESHES[str(row["mesh"])][0]
    one = one_device(tuple(row[name] for name in ONE_DEVICE))
    require_equal(gloo.run(ranks, run_in, str(tmp_path), overrides_of(row), True, "llama3_debug"), one)


def test_the_array_contains_every_pair_that_is_not_refused() -> None:
    array = rows()
    values = {"mesh": tuple(MESHES), **SWITCHES}
    for place, one in enumerate(NAMES):
        for other in NAMES[:place]:
            for pair in ((a, b) for a in values[one] for b in values[other]):
                there = any((row[one], row[other]) == pair for row in array)
                refused = is_refused({"mesh": "one device", one: pair[0], other: pair[1]})
                assert there or refused, f"{one} = {pair[0]} with {other} = {pair[1]}"


@pytest.mark.parametrize(
    ("mesh", "switch", "value"),
    [
        ("PP 2, ZBVZeroBubble", "compile.enable", "true"),
        ("PP 2, DualPipeV", "compile.enable", "true"),
        ("PP 2, LoopedBFS", "activation_checkpoint.offload_share", 1.0),
        ("PP 2, DualPipeV", "activation_checkpoint.offload_share", 1.0),
    ],
)
def test_pairs_outside_the_array_are_refused(mesh: str, switch: str, value: object) -> None:
    ranks, overrides = MESHES[mesh]
    assert is_refused({"mesh": mesh, switch: value})
    with pytest.raises(UserError):
        make_job("llama3_debug", {**COMMON, **overrides, switch: value}, ranks)
