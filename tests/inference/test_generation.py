"""Generating tokens, with and without a cache of keys and values.

``uv run pytest -m long tests/inference/test_generation.py -s`` measures what a token costs.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.tiny_part import CPU, tiny
from titan_core.api import ModelPart
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


def test_only_ids_of_the_tokenizer_are_generated() -> None:
    """Models often have more columns."""
    tokens: list[int] = []
    generator = Generator(tiny(), CPU, 10, lambda chosen: chosen)
    list(generator.generate(PROMPTS, Sampler(SamplingOptions()), 20, lambda index, token: not tokens.append(token)))
    assert len(tokens) == 60 and max(tokens) < 10


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


def costs_of_tokens(part: ModelPart, position: int, use_cache: bool, count: int, cost: Callable[[], float]) -> list[float]:
    """Return what ``cost`` grows by for each of ``count`` tokens after a prompt of ``position`` tokens and one more."""
    generator = Generator(part, CPU, 258, lambda chosen: chosen, use_cache)
    greedy = Sampler(SamplingOptions(temperature=0.0))
    steps = generator.generate([[5] * position], greedy, count + 1, lambda index, token: True)
    next(steps)  # computes the prompt
    costs = []
    for _ in range(count):
        before = cost()
        next(steps)
        costs.append(cost() - before)
    return costs


def test_a_token_computes_one_position_with_the_cache_and_all_without() -> None:
    part, positions = tiny(), [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], keywords: Any) -> None:
        positions[0] += inputs[0].numel()

    part.module.register_forward_pre_hook(count, with_kwargs=True)
    for position in (16, 512):
        assert costs_of_tokens(part, position, True, 3, lambda: positions[0]) == [1, 1, 1]
        whole = costs_of_tokens(part, position, False, 3, lambda: positions[0])
        assert whole == [position + 1, position + 2, position + 3]


@pytest.mark.long
def test_a_late_token_takes_hardly_longer_than_an_early_one_and_much_longer_without_the_cache() -> None:
    """Compares medians of CPU times, measured in turns: other load affects them alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    part = tiny(dim=512, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=1536)
    cases = {"early": (16, True, 20), "late": (512, True, 20), "late, without cache": (512, False, 4)}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    try:
        for _ in range(4):
            for name, (position, use_cache, count) in cases.items():
                seconds[name] += costs_of_tokens(part, position, use_cache, count, time.process_time)
    finally:
        torch.set_num_threads(threads)
    early, late, without = (statistics.median(times) for times in seconds.values())
    print(f"ms per token: at 16 {early * 1e3:.1f}, at 512 {late * 1e3:.1f}; without cache at 512 {without * 1e3:.1f}")
    assert late <= 1.2 * early
    assert without >= 5 * late
