"""Log-likelihoods of continuations, and perplexity per byte."""

from __future__ import annotations

import math

import pytest
import torch

from harness.tiny_part import CPU, tiny
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_inference.answers import Scorer
from titan_inference.perplexity import CountingTokenizer, Perplexity

PAIRS = [([256, 5, 9], [200, 31, 7]), ([256], [4]), ([256, *range(40)], [3, 3]), ([256, 1], list(range(60)))]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_sums_of_log_probabilities(batch_size: int) -> None:
    part = tiny()
    scores = Scorer(part, CPU, batch_size).score(PAIRS)
    for (context, continuation), (score, greedy) in zip(PAIRS, scores, strict=True):
        row = torch.tensor([[*context, *continuation]])
        with torch.no_grad():
            log_probabilities = part.module(row[:, :-1])[0, len(context) - 1 :].float().log_softmax(-1)
        wanted = torch.tensor(continuation)
        assert score == pytest.approx(float(log_probabilities.gather(-1, wanted[:, None]).sum()), rel=1e-5)
        assert greedy is bool((log_probabilities.argmax(-1) == wanted).all())


def test_the_most_likely_continuation_is_greedy() -> None:
    part = tiny()
    context = [256, 5]
    with torch.no_grad():
        likely = int(part.module(torch.tensor([context]))[0, -1].argmax())
    (likely_score, greedy), (other_score, other) = Scorer(part, CPU, 2).score([(context, [likely]), (context, [likely ^ 1])])
    assert greedy and not other and likely_score > other_score
    with torch.no_grad():
        second = int(part.module(torch.tensor([[*context, likely]]))[0, -1].argmax())
    (_, both), (_, one) = Scorer(part, CPU, 2).score([(context, [likely, second]), (context, [likely, second ^ 1])])
    assert both and not one


def test_a_pair_beyond_the_context_loses_its_first_tokens() -> None:
    part = tiny(max_seq_len=32)
    long, short = Scorer(part, CPU, 1).score([(list(range(100)), [7, 8]), (list(range(69, 100)), [7, 8])])
    assert long == short


def test_bytes_and_tokens_are_counted() -> None:
    counting = CountingTokenizer(ByteTokenizer())
    for text in ("", "abc", "é"):
        counting.encode_document(text)
    assert (counting.bytes, counting.tokens) == (5, 9)  # two tokens mark each document; the empty text is a probe
    assert counting.vocab_size == 258 and counting.decode([97]) == "a"


def test_bits_per_byte() -> None:
    found = Perplexity(loss=math.log(2) * 3, tokens=10, bytes_per_token=4.0, seconds=1.0)
    assert found.bits_per_byte == pytest.approx(0.75) and found.perplexity == pytest.approx(8.0)
    assert Perplexity(800.0, 1, None, 1.0).perplexity == math.inf
    assert Perplexity(800.0, 1, None, 1.0).bits_per_byte is None
