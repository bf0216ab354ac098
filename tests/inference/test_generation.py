"""Generating tokens, with and without a cache of keys and values."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.tiny_parts import CPU, tiny
from titan_core.api.model_part import ModelPart
from titan_inference.generation import PREFILL_TOKENS, Generator
from titan_inference.sampling import Sampler, SamplingOptions

PROMPTS = [[5, 9, 200, 31], [7], [4, 4, 18, 77, 78, 79, 80, 3, 9]]


def generated(
    part: ModelPart, prompts: list[list[int]], count: int, use_cache: bool, stop: tuple[int, ...] = (), **options: float
) -> list[list[int]]:
    generator = Generator(part, CPU, 258, lambda chosen: chosen, use_cache)
    sampler = Sampler(SamplingOptions(**options))  # type: ignore[arg-type]
    tokens: list[list[int]] = [[] for _ in prompts]

    def accept(index: int, token: int) -> bool:
        tokens[index].append(token)
        return token not in stop

    assert len(list(generator.generate(prompts, sampler, count, accept))) <= count
    return tokens


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}])
def test_the_cache_changes_nothing(options: dict[str, float]) -> None:
    part = tiny()
    cached = generated(part, PROMPTS, 20, use_cache=True, **options)
    assert cached == generated(part, PROMPTS, 20, use_cache=False, **options)
    assert len({tuple(one) for one in cached}) == 3


def test_a_prompt_is_continued_alike_alone_and_among_others() -> None:
    part = tiny()
    together = generated(part, PROMPTS, 12, use_cache=True, temperature=0.0)
    assert together == [generated(part, [prompt], 12, True, temperature=0.0)[0] for prompt in PROMPTS]


def test_a_long_prompt_is_computed_in_pieces() -> None:
    part = tiny()
    prompts = [list(range(3, 250)) * 3, [9] * (PREFILL_TOKENS + 1), [1, 2]]
    assert generated(part, prompts, 4, True, temperature=0.0) == generated(part, prompts, 4, False, temperature=0.0)


def test_a_sequence_ends_at_a_stop_token_and_the_others_continue() -> None:
    part = tiny()
    free = generated(part, PROMPTS, 8, use_cache=True, temperature=0.0)
    stop = free[0][2]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in free]
    assert generated(part, PROMPTS, 8, True, (stop,), temperature=0.0) == expected


class Mean(nn.Module):
    """A mixer that keeps nothing: the mean of the values so far."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        count = torch.arange(1, v.shape[2] + 1)[:, None]
        return (v.cumsum(2) / count).repeat_interleave(q.shape[1] // v.shape[1], 1)


def test_a_model_that_keeps_nothing_is_computed_without_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    part = tiny()
    part.module.get_submodule("layers.1.attention").mixer = Mean()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        cached = generated(part, PROMPTS, 6, use_cache=True, temperature=0.0)
    assert "keep no keys and values" in caplog.text
    assert cached == generated(part, PROMPTS, 6, use_cache=False, temperature=0.0)
    caplog.clear()
    none = replace(part, layout=replace(part.layout, mixers={}))
    generated(none, PROMPTS, 2, use_cache=True, temperature=0.0)
    assert "keep no keys and values" in caplog.text
