"""Variable-length attention: bounds are those of the documents, and it computes what a mask does, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from harness import varlen_kernel
from harness.model_trials import require
from titan_core.api import Batch, UserError
from titan_core.api.model import packed_attention
from titan_core.api.model.attention import attend
from titan_core.api.model.packed_attention import attend_packed, packed_documents
from titan_core.api.training.batch import join_batches
from titan_core.data.batches import with_document_ends
from titan_testing.jobs import make_job

SEQ = 192


def packed(rows: int, seq: int = SEQ, mean: int = 12, seed: int = 0) -> Batch:
    """Return sequences of documents of random lengths."""
    starts = torch.rand(rows, seq, generator=torch.Generator().manual_seed(seed)) < 1 / mean
    starts[:, 0] = False
    tokens = torch.zeros(rows, seq, dtype=torch.int64)
    return with_document_ends(Batch(tokens, tokens, documents=starts.long().cumsum(1)))


def lengths_of(batch: Batch) -> list[int]:
    """Return the lengths of the documents by their ids, in order."""
    assert batch.documents is not None
    return [length for row in batch.documents for length in row.unique_consecutive(return_counts=True)[1].tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_those_of_the_documents(seed: int) -> None:
    whole = packed(6, mean=(2, 12, 40, 500)[seed], seed=seed)
    parts = [whole, *whole.split(2), join_batches([packed(2, mean=3), packed(1, mean=50)])]
    for batch in parts:
        found = packed_documents(batch)
        assert found is not None and found.ends.dtype == torch.int32 and found.shape == tuple(batch.tokens.shape)
        lengths = found.ends.diff()
        assert lengths[lengths > 0].tolist() == lengths_of(batch)
        assert found.ends[0] == 0 and found.ends[-1] == batch.tokens.numel()
        assert max(lengths_of(batch)) <= found.longest <= SEQ
    assert packed_documents(replace(whole, document_ends=None)) is None


def test_few_shapes_and_lengths_occur() -> None:
    """Whoever makes kernels or compiled code for a shape makes some ten, and not one for each batch."""
    batches = [packed(2, seq=2048, mean=mean, seed=mean) for mean in numpy.linspace(4, 1500, 60, dtype=int).tolist()]
    assert len({batch.document_ends.shape for batch in batches if batch.document_ends is not None}) <= 8
    assert {batch.longest_document for batch in batches} <= {256, 512, 1024, 2048}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "scale": {"scale": 0.9},
    "window and scale": {"window": 30, "scale": 0.3},
}


@pytest.mark.parametrize("widths", [(16, 16), (16, 8), (12, 20)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_kernel_computes_what_a_mask_does(heads: tuple[int, int], widths: tuple[int, int], option: str) -> None:
    varlen_kernel.register()
    generator, batch = torch.Generator().manual_seed(1), packed(3)
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    plain = [torch.randn(3, count, SEQ, width, generator=generator, requires_grad=True) for count, width in shapes]
    documents = packed_documents(batch)
    assert documents is not None
    found = attend_packed(*plain, documents, **OPTIONS[option])
    expected = attend(*plain, documents=batch.documents, **OPTIONS[option])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    gradient = torch.randn(expected.shape, generator=generator)
    for mine, theirs in zip(*(torch.autograd.grad(one, plain, gradient) for one in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=1e-4)
    window = OPTIONS[option].get("window")
    assert [call["window"] for call in varlen_kernel.calls] == [[-1 if window is None else window - 1, 0]]
    assert varlen_kernel.calls[0]["heads"] == heads  # grouped heads are not repeated


def test_heads_that_no_kernel_takes_are_refused() -> None:
    documents, heads = packed_documents(packed(1)), torch.zeros(1, 1, SEQ, 264)
    assert documents is not None
    with pytest.raises(UserError, match=r'document_attention = "varlen": heads have 264 features.* 256 .*set it to "flex"'):
        attend_packed(heads, heads, heads, documents)


@pytest.mark.parametrize("dim", [512, 528])
def test_a_job_whose_heads_are_too_wide_is_refused_before_it_trains(dim: int) -> None:
    settings: dict[str, object] = {
        "model.args": f"{{dim = {dim}, n_heads = 2, n_kv_heads = 2}}",
        "data.document_mask": "true",
        "data.document_attention": "varlen",
        "training.mixed_precision_param": "bfloat16",
    }
    job = make_job("tiny", settings)
    refused = r"data\.document_attention.*heads have 264 features.* 256 at most"
    with pytest.raises(UserError, match=refused) if dim > 512 else nullcontext():
        require(job)


def test_fp32_keeps_its_mask() -> None:
    """As in trials of a model, which compute in fp32 whatever the job does."""
    documents = packed_documents(packed(1))
    assert documents is not None
    heads: Tensor = torch.zeros(1, 1, SEQ, 16)
    assert packed_attention.is_packed(documents, heads.bfloat16(), heads.bfloat16())
    assert not packed_attention.is_packed(documents, heads, heads)
    assert not packed_attention.is_packed(documents, heads.bfloat16()[:, :, :96], heads.bfloat16())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"training.mixed_precision_param": "bfloat16"},
            "computes attention within documents, and data.document_mask = false",
        ),
        ({"data.document_mask": "true"}, "half precision, and training.mixed_precision_param = 'float32'"),
    ],
)
def test_a_job_that_cannot_use_the_kernel_is_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=f"data.document_attention.*{why}"):
        make_job("tiny", {"data.document_attention": "varlen", **settings})
