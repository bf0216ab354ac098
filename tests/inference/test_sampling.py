"""Choosing tokens, held against transformers' logits processors."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from titan_inference.sampling import Sampler, SamplingOptions, filtered

LOGITS = torch.randn(16, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("top_k", [0, 1, 7, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_keep_what_those_of_transformers_keep(top_k: int, top_p: float, min_p: float) -> None:
    processors = LogitsProcessorList()
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        processors.append(MinPLogitsWarper(min_p))
    ours = filtered(LOGITS, SamplingOptions(top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(ours, processors(torch.zeros(16, 1, dtype=torch.long), LOGITS.clone()))


def test_a_temperature_of_0_takes_the_most_likely_token() -> None:
    assert torch.equal(Sampler(SamplingOptions(temperature=0.0))(LOGITS, [0] * 16), LOGITS.argmax(-1))


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sampler = Sampler(SamplingOptions(seed=3))
    drawn = torch.cat([sampler(logits[None], [length]) for length in range(4000)])
    assert drawn.bincount(minlength=4) / 4000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_a_draw_depends_on_seed_sequence_and_length_alone() -> None:
    first = Sampler(SamplingOptions(seed=1))(LOGITS, list(range(16)))
    assert torch.equal(first[:4], Sampler(SamplingOptions(seed=1))(LOGITS[:4], list(range(4))))
    assert not torch.equal(first, Sampler(SamplingOptions(seed=2))(LOGITS, list(range(16))))


def test_the_temperature_comes_before_the_filters() -> None:
    # At temperature 2, probabilities are square roots, scaled: 0.418, 0.241, 0.170, 0.170. The first is less than top_p, the
    # first two are more. At temperature 1, the first token alone reaches top_p.
    logits = torch.tensor([0.6, 0.2, 0.1, 0.1]).log()
    sampler = Sampler(SamplingOptions(temperature=2.0, top_p=0.6))
    drawn = torch.cat([sampler(logits[None], [length]) for length in range(4000)])
    assert drawn.bincount(minlength=4) / 4000 == pytest.approx([0.634, 0.366, 0.0, 0.0], abs=0.03)


def test_sequences_of_one_batch_draw_independently() -> None:
    drawn = Sampler(SamplingOptions())(torch.zeros(64, 50), [7] * 64)
    assert len(drawn.unique()) > 20
