"""Attention within documents, and validation, give the same results on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention

from harness import varlen_kernel
from harness.objectives import first_step
from harness.quick import rows
from titan_core.api import Batch, Microbatch, UserError, current_microbatch
from titan_core.api.model import attention, attention_mask, packed_attention
from titan_core.api.parallel import microbatch
from titan_core.api.parallel.model_part import arguments_of
from titan_core.api.training.batch import IGNORE
from titan_core.job import checks
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_parallel import context_parallel
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import CP, DR, FAST, HEADS, PP, SCHEDULE, TP, require_equal, run_in


@pytest.fixture(scope="module")
def data() -> dict[str, object]:
    """Short documents, several per sequence, and a validation set that no mesh divides evenly."""
    generator = torch.Generator().manual_seed(0)

    def documents(count: int) -> str:
        return "/".join(map(str, torch.randint(1, 40, (count,), generator=generator).tolist()))

    return {
        **FAST,
        "training.dataset": "letters",
        "training.dataset_path": documents(400),
        "data.document_mask": "true",
        "validation.enable": "true",
        "validation.dataset": "letters",
        "validation.dataset_path": documents(37),
        "validation.freq": 4,
    }


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, data: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), data)[0]


CASES: dict[str, tuple[int, dict[str, object]]] = {
    "accumulation": (1, {"training.local_batch_size": 8}),
    "FSDP 4": (4, {}),
    "HSDP 2x2": (4, {DR: 2}),
    "TP 2, selective": (2, {TP: 2, "activation_checkpoint.mode": "selective"}),
    "PP 2, 1F1B": (2, {PP: 2, SCHEDULE: "1F1B"}),
    "PP 2, GPipe, full": (2, {PP: 2, SCHEDULE: "GPipe", "activation_checkpoint.mode": "full"}),
    "PP 2, Interleaved1F1B": (2, {PP: 2, SCHEDULE: "Interleaved1F1B"}),
    "PP 2, ZBVZeroBubble, selective": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "activation_checkpoint.mode": "selective"}),
    "CP 2, full": (2, {CP: 2, "activation_checkpoint.mode": "full"}),
    "CP 4 by heads": (4, {CP: 4, HEADS: 4}),
    "CP 2x2 by rings and heads, selective": (4, {CP: 4, HEADS: 2, "activation_checkpoint.mode": "selective"}),
    "TP x CP": (4, {TP: 2, CP: 2}),
    "TP x CP by heads": (4, {TP: 2, CP: 2, HEADS: 2}),
    "FSDP x PP x CP": (8, {PP: 2, CP: 2}),
}


QUICK = ("accumulation", "PP 2, Interleaved1F1B")
FULL = ("FSDP x PP x CP", "TP x CP by heads", "CP 2, full", "PP 2, ZBVZeroBubble, selective")


@pytest.mark.parametrize("case", rows(CASES, QUICK, FULL))
def test_training_and_validation_equal_those_of_one_device(
    gloo: GlooPool, data: dict[str, object], one_device: RunRecord, tmp_path: Path, case: str
) -> None:
    ranks, overrides = CASES[case]
    require_equal(gloo.run(ranks, run_in, str(tmp_path), {**data, **overrides}), one_device)


def run_with_flex(directory: str, overrides: dict[str, object]) -> RunRecord:
    """Train with FlexAttention, as on GPUs, but uncompiled: then it has a backward on CPUs, which torch refuses to use."""
    making: list[Microbatch] = []
    make = Microbatch.make_document_mask

    def make_blocks(microbatch: Microbatch, *args: Any) -> None:
        making.append(microbatch)
        make(microbatch, *args)
        making.pop()

    def uses_block_masks(device: torch.device) -> bool:
        return bool(making) or current_microbatch() is not None  # not in trials of layers, which know no FlexAttention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Microbatch, "make_document_mask", make_blocks)
        for module in (attention_mask, attention, context_parallel):
            patch.setattr(module, "uses_block_masks", uses_block_masks)
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        return run_in(directory, overrides)


def run_with_varlen(directory: str, overrides: dict[str, object]) -> tuple[RunRecord, int]:
    """Train with variable-length attention, as on GPUs, by a kernel for CPUs and in fp32, which the GPU's do not compute.
    Return also how often its forward pass was called."""
    varlen_kernel.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbatch, "uses_block_masks", lambda device: True)
        patch.setattr(packed_attention, "_TYPES", (torch.float32,))
        patch.setattr(checks, "_KERNEL_TYPES", ("float32",))
        record = run_with_flex(directory, {"data.document_attention": "varlen", **overrides})
    return record, len(varlen_kernel.calls)


AC = "activation_checkpoint.mode"
COMPILED = {"compile.enable": "true", "compile.backend": "aot_eager"}
NARROW = "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64"
VARLEN_CASES: dict[str, tuple[int, dict[str, object], int]] = {
    "one device": (1, {}, 8),
    "full": (1, {AC: "full"}, 16),
    "selective": (1, {AC: "selective"}, 8),
    "compiled": (1, COMPILED, 8),
    "compiled, selective": (1, {**COMPILED, AC: "selective"}, 8),
    "FSDP 2": (2, {}, 4),
    "TP 2, selective": (2, {TP: 2, AC: "selective"}, 8),
    "PP 2, ZBVZeroBubble, selective": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", AC: "selective"}, 8),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2}, 8),
    "CP 2": (2, {CP: 2}, 0),
    "CP 2x2 by rings and heads": (4, {CP: 4, HEADS: 2}, 0),
    "windows": (1, {"model.args": f"{NARROW}, window = 10}}"}, 4),
    "capped scores": (1, {"model.args": f"{NARROW}, softcap = 4.0}}"}, 0),
}
"""Ranks, settings, and how often the forward kernel is called on each rank: once a layer and microbatch, unless full
recomputation calls it again, or FlexAttention takes its place."""
VARLEN_FULL = ("full", "compiled, selective", "TP 2, selective", "PP 2, ZBVZeroBubble, selective", "CP 2 by heads", "CP 2")


@pytest.mark.parametrize("case", rows(VARLEN_CASES, ("selective", "windows"), VARLEN_FULL))
def test_variable_length_attention_equals_the_dense_mask(
    gloo: GlooPool, data: dict[str, object], tmp_path: Path, case: str
) -> None:
    ranks, overrides, calls = VARLEN_CASES[case]
    short = {**data, "training.steps": 1, "training.global_batch_size": 4, "validation.enable": "false"}
    same = {key: value for key, value in overrides.items() if key == "model.args"}
    dense = gloo.run(1, run_in, str(tmp_path), {**short, **same})[0]
    found = gloo.run(ranks, run_with_varlen, str(tmp_path), {**short, **overrides})
    require_equal([record for record, _ in found], dense)
    assert [called for _, called in found] == [calls] * ranks


WINDOWS = {"model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64, window = 10, softcap = 4.0}"}
FLEX_CASES: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "TP 2, full": (2, {TP: 2, "activation_checkpoint.mode": "full"}),
    "CP 2": (2, {CP: 2}),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2}),
    "CP 2x2 by rings and heads": (4, {CP: 4, HEADS: 2}),
    "CP 4, selective": (4, {CP: 4, "activation_checkpoint.mode": "selective"}),
    "PP 2, ZBVZeroBubble, selective": (2, {PP: 2, SCHEDULE: "ZBVZeroBubble", "activation_checkpoint.mode": "selective"}),
    "windows, CP 2": (2, {CP: 2, **WINDOWS}),
    "windows without documents, CP 2": (2, {CP: 2, "data.document_mask": "false", **WINDOWS}),
    "windows without documents, CP 2x2 by rings and heads": (4, {CP: 4, HEADS: 2, "data.document_mask": "false", **WINDOWS}),
    "windows without documents, CP 2 by heads": (2, {CP: 2, HEADS: 2, "data.document_mask": "false", **WINDOWS}),
}


FLEX_QUICK = ("CP 2", "windows without documents, CP 2x2 by rings and heads")
FLEX_FULL = ("TP 2, full", "CP 4, selective", "PP 2, ZBVZeroBubble, selective", "windows, CP 2")


@pytest.mark.parametrize("case", rows(FLEX_CASES, FLEX_QUICK, FLEX_FULL))
def test_flex_attention_equals_the_dense_mask(gloo: GlooPool, data: dict[str, object], tmp_path: Path, case: str) -> None:
    ranks, overrides = FLEX_CASES[case]
    short = {**data, "training.steps": 1, "training.global_batch_size": 4, "validation.enable": "false"}
    same = {key: value for key, value in overrides.items() if key in ("model.args", "data.document_mask")}
    dense = gloo.run(1, run_in, str(tmp_path), {**short, **same})[0]
    require_equal(gloo.run(ranks, run_with_flex, str(tmp_path), {**short, **overrides}), dense)


def test_the_mask_changes_the_loss_and_validation_does_not(
    gloo: GlooPool, data: dict[str, object], one_device: RunRecord, tmp_path: Path
) -> None:
    """Otherwise the comparison above could pass without a mask or validation."""
    (unmasked,) = gloo.run(1, run_in, str(tmp_path), {**data, "data.document_mask": "false"})
    assert unmasked.losses[1:] != pytest.approx(one_device.losses[1:], rel=1e-3)
    (unvalidated,) = gloo.run(1, run_in, str(tmp_path / ".."), {**data, "validation.enable": "false"})
    assert unvalidated.losses == one_device.losses
    assert unvalidated.validation == {}
    assert sorted(one_device.validation) == [4, 6]


def test_validation_reads_each_token_once(data: dict[str, object], one_device: RunRecord) -> None:
    lengths = [int(length) for length in str(data["validation.dataset_path"]).split("/")]
    # Every token of a document except the last has a target; the last token of a window is only a target.
    tokens = sum(length + 1 for length in lengths)
    _, targets = one_device.validation[4]
    windows = tokens / 49 + 8  # full ones, and one at the end of each logical shard
    assert tokens - windows <= targets <= tokens


def test_packed_documents_train_as_separate_ones() -> None:
    job = make_job("tiny", {**FAST, "training.global_batch_size": 2, "job.device": "cpu"})
    lengths = [[5, 20, 1, 22], [48]]
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    packed = part.forward_loss(first_step(Batch(tokens, targets, positions=positions, documents=documents)))
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in part.module.named_parameters()}
    part.module.zero_grad()
    separate = torch.zeros(())
    for row, sizes in enumerate(lengths):
        for document in tokens[row].split(sizes):
            if len(document) > 1:
                logits = part.module(document[None, :-1])
                loss = F.cross_entropy(logits[0], document[1:], reduction="sum")
                loss.backward()
                separate += loss.detach()
    assert packed.item() == pytest.approx(separate.item(), rel=1e-6)
    for name, parameter in part.module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    assert set(arguments_of(Batch(tokens, targets, documents=documents), part.layout)) == {"documents"}


def test_a_model_without_document_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from titan_testing import tiny

    original: Callable[..., object] = tiny.layout
    monkeypatch.setattr(tiny, "layout", lambda args: replace(original(args), masks_documents=False))  # type: ignore[type-var]
    with pytest.raises(UserError, match=r"data\.document_mask = true: model 'tiny' cannot confine attention"):
        make_job("tiny", {"data.document_mask": "true"})
