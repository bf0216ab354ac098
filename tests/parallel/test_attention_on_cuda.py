"""Attention's CUDA code on fake tensors: context parallelism, document masks, and what recomputation keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.fake_cuda import FakeCuda, train_simulated
from harness.quick import rows
from titan_parallel.torch_private import AttentionKernel, attention_kernel

TINY: dict[str, object] = {
    "model.args": "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128}", "training.seq_len": 512,
    "training.local_batch_size": 1, "training.global_batch_size": 2, "lr_scheduler.warmup_steps": 1,
    "training.mixed_precision_param": "bfloat16",
}  # fmt: skip
LAYERS = 2
TP, CP = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
HEADS = "parallelism.context_parallel_heads_degree"
METHOD = "parallelism.context_parallel_rotate_method"
DOCUMENTS = {"data.document_mask": "true"}
AC = "activation_checkpoint.mode"


def collectives(found: Any) -> dict[tuple[str, str], int]:
    """Return how often each collective of context parallelism runs in a layer, by (operator, phase)."""
    return {
        (one.operator.removeprefix("c10d::"), one.phase): one.count // LAYERS
        for one in found.steps[-1].collectives
        if one.group == "mesh_cp" and "wrap_tensor" not in one.operator
    }


RING = {
    f"{method}, {mode}, CP {size}": (method, mode, size)
    for method in ("allgather", "alltoall")
    for mode in ("none", "selective", "full")
    for size in (2, 4, 8)
}


RING_QUICK = ("allgather, selective, CP 4", "alltoall, full, CP 2")
RING_FULL = ("allgather, full, CP 2", "allgather, none, CP 8", "alltoall, selective, CP 4", "alltoall, none, CP 8")


@pytest.mark.parametrize("case", rows(RING, RING_QUICK, RING_FULL))
def test_the_ring_communicates_once_forward_and_once_backward(fake_cuda: FakeCuda, case: str) -> None:
    method, mode, size = RING[case]
    found = fake_cuda.train("tiny", {**TINY, CP: size, METHOD: method, AC: mode}, 2 * size, rank=1)
    again = mode == "full"  # other modes keep the result of the forward pass
    if method == "allgather":
        expected = {
            ("_allgather_base_", "forward"): 1,
            ("_allgather_base_", "backward"): 1 + again,
            ("_reduce_scatter_base_", "backward"): 1,
        }
    else:
        expected = {("alltoall_base_", "forward"): size - 1, ("alltoall_base_", "backward"): (1 + again) * (size - 1) + size}
    assert collectives(found) == expected


BY_HEADS = {
    f"{mode}, CP {size}, {heads} by heads": (mode, size, heads)
    for mode in ("none", "selective", "full")
    for size, heads in ((2, 2), (4, 4), (4, 2))
}


BY_HEADS_QUICK = ("selective, CP 4, 2 by heads", "full, CP 2, 2 by heads")
BY_HEADS_FULL = ("none, CP 4, 4 by heads", "full, CP 4, 2 by heads")


@pytest.mark.parametrize("case", rows(BY_HEADS, BY_HEADS_QUICK, BY_HEADS_FULL))
def test_heads_are_exchanged_twice_forward_and_twice_backward(fake_cuda: FakeCuda, case: str) -> None:
    mode, size, heads = BY_HEADS[case]
    found = fake_cuda.train("tiny", {**TINY, CP: size, HEADS: heads, AC: mode}, 2 * size, rank=1)
    again = mode == "full"
    exchanged = [one for one in found.steps[-1].collectives if one.group == "mesh_cp_heads"]
    counts = {phase: sum(one.count for one in exchanged if one.phase == phase) for phase in ("forward", "backward")}
    assert {one.operator for one in exchanged} == {"_c10d_functional::all_to_all_single"}
    # Recomputation ends before the exchange of the results, which no backward reads.
    assert counts == {"forward": 2 * LAYERS, "backward": (2 + 2 * again) * LAYERS}
    gathered = [one.phase for one in found.steps[-1].collectives if one.group == "mesh_cp_heads_remainder"]
    assert bool(gathered) == (size > heads)


PACKED = {
    "one device": (1, {}),
    "selective": (1, {AC: "selective"}),
    "CP 2, full": (2, {CP: 2, AC: "full"}),
    "CP 4, selective": (4, {CP: 4, AC: "selective"}),
    "TP 2 x CP 2, selective": (4, {TP: 2, CP: 2, AC: "selective"}),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2}),
    "CP 4, 2 by heads, selective": (4, {CP: 4, HEADS: 2, AC: "selective"}),
}


@pytest.mark.parametrize("case", rows(PACKED, ("selective", "TP 2 x CP 2, selective")))
def test_documents_need_no_dense_mask(fake_cuda: FakeCuda, case: str) -> None:
    ranks, overrides = PACKED[case]
    found = fake_cuda.train("tiny", {**TINY, **DOCUMENTS, **overrides}, ranks, rank=ranks - 1)
    shapes = {one.shape for step in found.steps for phase in step.phases for one in phase.peak.allocations}
    attended = {one.operator for phase in found.steps[-1].phases for one in phase.peak.allocations}
    assert any("flex_attention" in operator for operator in attended)
    queries = 512 * int(str(overrides.get(HEADS, 1))) // int(str(overrides.get(CP, 1)))
    assert not [shape for shape in shapes if shape[-2:] in ((queries, 512), (512, queries))]


VARLEN = {**DOCUMENTS, "data.document_attention": "varlen"}


def varlen_calls(overrides: dict[str, object], ranks: int) -> tuple[set[Any], int]:
    """Return what is passed to torch's variable-length attention on the last rank, and the operations of a forward pass."""
    from titan_core.api.model import packed_attention

    calls = set()
    attend = packed_attention._kernel()

    def recorded(
        q: Any, k: Any, v: Any, ends: Any, ends_of_keys: Any, longest: int, longest_key: int, **options: Any
    ) -> Any:
        assert ends is ends_of_keys and ends.device.type == "cuda" and ends.dtype == torch.int32
        calls.add((tuple(q.shape), tuple(k.shape), len(ends), longest, longest_key, *sorted(options.items())))
        return attend(q, k, v, ends, ends_of_keys, longest, longest_key, **options)

    packed_attention._kernel = lambda: recorded  # type: ignore[assignment]
    found = train_simulated("tiny", overrides, ranks, ranks - 1, True, "NVIDIA H100 80GB HBM3")
    return calls, next(phase.flops for phase in found.steps[-1].phases if phase.name == "forward")


VARLEN_CASES = {
    "one device, selective": (1, {AC: "selective"}, (512, 4, 2)),
    "TP 2, full": (2, {TP: 2, AC: "full"}, (512, 2, 1)),
    "CP 2 by heads": (2, {CP: 2, HEADS: 2}, (512, 2, 1)),
    "two sequences": (1, {"training.local_batch_size": 2}, (1024, 4, 2)),
    "windows": (1, {"model.args": str(TINY["model.args"]).replace("}", ", window = 100}")}, (512, 4, 2)),
}


@pytest.mark.parametrize("case", rows(VARLEN_CASES, (), ("one device, selective", "CP 2 by heads", "windows")))
def test_variable_length_attention_gets_bounds_without_a_wait(fake_cuda: FakeCuda, case: str) -> None:
    ranks, overrides, (positions, heads, key_heads) = VARLEN_CASES[case]
    calls, flops = fake_cuda.call(varlen_calls, {**TINY, **VARLEN, **overrides}, ranks)
    windows = (99, -1) if case == "windows" else (-1,)  # of every second layer
    assert {call[:2] for call in calls} == {((positions, heads, 16), (positions, key_heads, 16))}
    assert {call[5:] for call in calls} == {(("scale", 0.25), ("window_size", (one, 0))) for one in windows}
    for _, _, bounds, longest, longest_key, *_ in calls:
        assert (bounds - 1) % 8 == 0 and longest == longest_key and longest in (256, 512)
    if case != "windows":  # which torch 2.11 does not count
        plain = fake_cuda.train("tiny", {**TINY, **overrides}, ranks, rank=ranks - 1)
        most = next(phase.flops for phase in plain.steps[-1].phases if phase.name == "forward")
        assert 0.8 * most < flops <= most  # documents are counted as long as the longest


@pytest.mark.full
@pytest.mark.parametrize("settings", [{CP: 2}, {CP: 4, HEADS: 2}], ids=str)
def test_a_ring_keeps_block_masks(fake_cuda: FakeCuda, settings: dict[str, object]) -> None:
    ranks = int(str(settings[CP]))
    assert fake_cuda.call(varlen_calls, {**TINY, **VARLEN, **settings}, ranks)[0] == set()


OPTIONS = {
    "one device": (1, {}),
    "documents": (1, {**DOCUMENTS, AC: "selective"}),
    "TP 2": (2, {TP: 2, AC: "full"}),
    "CP 2": (2, {CP: 2}),
    "CP 2 by heads, documents": (2, {CP: 2, HEADS: 2, AC: "selective", **DOCUMENTS}),
    "CP 4, 2 by heads": (4, {CP: 4, HEADS: 2}),
}


@pytest.mark.parametrize("case", rows(OPTIONS, (), ("documents", "TP 2", "CP 2 by heads, documents")))
def test_windows_capped_scores_and_sinks_train(fake_cuda: FakeCuda, case: str) -> None:
    ranks, overrides = OPTIONS[case]
    args = str(TINY["model.args"]).replace("}", ", window = 100, softcap = 20.0, sinks = true}")
    found = fake_cuda.train("tiny", {**TINY, "model.args": args, **overrides}, ranks, rank=ranks - 1)
    attended = {one.operator for phase in found.steps[-1].phases for one in phase.peak.allocations}
    assert any("flex_attention" in operator for operator in attended)


def masks_made(overrides: dict[str, object], ranks: int) -> int:
    """Return how many masks the last rank makes for each microbatch."""
    from titan_core.api.model import attention_mask

    made = []
    make = attention_mask.block_mask

    def counted(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    attention_mask.block_mask = counted
    found = train_simulated("tiny", overrides, ranks, ranks - 1, True, "NVIDIA H100 80GB HBM3")
    microbatches = len(found.steps) * 2
    assert len(made) % microbatches == 0
    return len(made) // microbatches


MASKS = {
    "one device": 2,
    "documents": 2,
    "TP 2": 2,
    # Of the window, one for each of the rank's two chunks.
    "CP 2": 3,
    "CP 2, documents": 3,
    "CP 2 by heads, documents": 2,
    "CP 2 by heads": 2,
    "CP 4, 2 by heads": 3,
}
CP_OPTIONS = {**OPTIONS, "CP 2, documents": (2, {CP: 2, AC: "full", **DOCUMENTS}), "CP 2 by heads": (2, {CP: 2, HEADS: 2})}


@pytest.mark.parametrize("case", rows(MASKS, (), ("TP 2", "CP 2, documents", "CP 4, 2 by heads")))
def test_masks_are_made_once_for_a_microbatch_and_distinct_window(fake_cuda: FakeCuda, case: str) -> None:
    """Whatever the number of layers, and whether they are recomputed."""
    ranks, overrides = CP_OPTIONS[case]
    args = str(TINY["model.args"]).replace("n_layers = 2", "n_layers = 6").replace("}", ", window = 100, softcap = 20.0}")
    assert fake_cuda.call(masks_made, {**TINY, "model.args": args, **overrides}, ranks) == MASKS[case]


def kernel_faults(name: str, dtype: torch.dtype) -> list[str]:
    """Return which results of a kernel have unexpected shapes or types."""
    kernel = AttentionKernel(name)
    q, k = (torch.empty(2, heads, 40, 64, device="cuda", dtype=dtype) for heads in (4, 2))
    out, logsumexp = kernel.forward(q, k, k, True, 0.125)
    found = {"out": (out, q), "q": (None, q), "k": (None, k), "v": (None, k)}
    gradients = kernel.backward(out, q, k, k, out, logsumexp.contiguous(), True, 0.125)
    found.update({part: (gradient, found[part][1]) for part, gradient in zip("qkv", gradients, strict=True)})
    faults = [
        part
        for part, (result, like) in found.items()
        if (result.shape, result.dtype) != (like.shape, like.dtype)  # type: ignore[union-attr]
    ]
    expected = (torch.Size((2, 4, 40)), torch.float32)
    return faults if (logsumexp.shape, logsumexp.dtype) == expected else [*faults, "logsumexp"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("flash_attention", torch.bfloat16), ("cudnn_attention", torch.bfloat16), ("efficient_attention", torch.float32)],
)
def test_kernels_return_what_the_ring_merges(fake_cuda: FakeCuda, name: str, dtype: torch.dtype) -> None:
    assert fake_cuda.run(kernel_faults, name, dtype) == []


def chosen(dtype: torch.dtype) -> str:
    q = torch.empty(1, 2, 16, 64, device="cuda", dtype=dtype)
    return attention_kernel(q, q).name


def test_half_precision_uses_flash_attention(fake_cuda: FakeCuda) -> None:
    assert fake_cuda.run(chosen, torch.bfloat16) == "flash_attention"
    assert fake_cuda.run(chosen, torch.float32) == "efficient_attention"
