"""Batches: tokens, next tokens as targets, positions and documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from harness.letters import BYTE, letters, stream
from harness.loaders import plan
from titan_core.api.training.batch import IGNORE, with_positions
from titan_core.data.batches import _batch
from titan_core.data.loader import DataLoader


def rows(*values: list[int]) -> Any:
    return numpy.array(values, numpy.uint32)


def test_targets_of_a_batch_are_the_next_tokens_of_each_row() -> None:
    batch = _batch(rows([1, 2, 3, 4], [5, 6, 7, 8]), None, [[4], [1, 3]], document_mask=False)
    assert batch.tokens.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.targets.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch.positions is None and batch.documents is None
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_with_document_mask_the_last_token_of_a_document_has_no_target() -> None:
    batch = _batch(rows([1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]), None, [[2, 1, 3], [6]], document_mask=True)
    assert batch.targets.tolist() == [[2, IGNORE, IGNORE, 5, 6], [8, 9, 1, 2, 3]]
    assert batch.positions is not None and batch.documents is not None
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.documents.tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]


def test_weights_belong_to_targets() -> None:
    weights = numpy.array([[9, 0, 2, 0.5, 1, 3]], numpy.float32)
    batch = _batch(rows([1, 2, 3, 4, 5, 6]), weights, [[4, 2]], document_mask=False)
    assert batch.targets.tolist() == [[IGNORE, 3, 4, 5, 6]]
    assert batch.target_weights().tolist() == [[0, 2, 0.5, 1, 3]]
    apart = _batch(rows([1, 2, 3, 4, 5, 6]), weights, [[4, 2]], document_mask=True)
    assert apart.target_weights().tolist() == [[0, 2, 0.5, 0, 3]]
    assert _batch(rows([1, 2, 3]), None, [[3]], document_mask=False).target_weights().tolist() == [[1, 1]]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize(("pieces", "targets"), [([], 0), ([1], 0), ([2], 1), ([3], 2), ([4], 3)])
def test_padding_of_a_short_row_is_no_target(document_mask: bool, pieces: list[int], targets: int) -> None:
    batch = _batch(rows([9, 8, 7, 6]), None, [pieces], document_mask)
    assert batch.targets.tolist() == [[8, 7, 6][:targets] + [IGNORE] * (3 - targets)]


def test_microbatches_keep_all_tensors_of_a_batch() -> None:
    batch = _batch(rows(*([row, 1, 2, 3] for row in range(5))), None, [[4]] * 5, document_mask=True)
    cut = batch.split(2)
    assert [len(microbatch.tokens) for microbatch in cut] == [2, 2, 1]
    for name in ("tokens", "targets", "positions", "documents"):
        assert torch.equal(torch.cat([getattr(microbatch, name) for microbatch in cut]), getattr(batch, name))
    assert with_positions(replace(batch, positions=None)).positions is not None
    assert torch.equal(with_positions(batch).positions, batch.positions)  # type: ignore[arg-type]
    fresh = with_positions(replace(batch, positions=None)).positions
    assert fresh is not None and fresh.tolist() == [[0, 1, 2]] * 5


class OneToken:
    """A dataset of one-token documents without marks."""

    num_documents = None

    def shard(self, index: int, count: int, epoch: int) -> Any:
        return self

    def __next__(self) -> Any:
        return numpy.array([65])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_sequences_without_a_target_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    spec = stream(letters("30,40,50,60"), letters("1", "single"), plan=plan(1, global_size=4, shards=1))
    for document_mask in (False, True):
        sources: Any = [spec.datasets[0].build.load()(spec.datasets[0].context), OneToken()]
        loader = DataLoader(spec, sources, BYTE, 0, document_mask=document_mask)
        step = loader.next_step()
        assert step is not None
        loader.close()
        assert step.targets_by_dataset == [14, 0 if document_mask else 14]
        message = "dataset 'single': a sequence has no token to train on: each of its documents has one token"
        assert caplog.text.count(message) == document_mask  # once, not for each sequence
