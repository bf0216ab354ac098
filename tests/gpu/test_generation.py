"""Text generated on a GPU."""

from __future__ import annotations

import pytest
import torch

from harness.tiny_part import tiny
from titan_inference.generation import Generator
from titan_inference.sampling import Sampler, SamplingOptions

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], [7], [4, 4, 18, 77, 78, 79, 80, 3, 9]]


def generated(device: torch.device, use_cache: bool, **options: float) -> list[list[int]]:
    part = tiny()
    part.module.to(device)
    generator = Generator(part, device, 258, lambda chosen: chosen, use_cache)
    tokens: list[list[int]] = [[] for _ in PROMPTS]

    def accept(index: int, token: int) -> bool:
        tokens[index].append(token)
        return True

    list(generator.generate(PROMPTS, Sampler(SamplingOptions(**options)), 24, accept))  # type: ignore[arg-type]
    return tokens


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "whole"])
def test_greedy_tokens_are_those_of_the_cpu(device: torch.device, use_cache: bool) -> None:
    """In fp32, where the likeliest tokens of this model are further apart than rounding moves them."""
    found = generated(device, use_cache, temperature=0.0)
    assert found == generated(torch.device("cpu"), use_cache, temperature=0.0)
    assert [len(tokens) for tokens in found] == [24, 24, 24]
    assert len({tuple(tokens) for tokens in found}) == 3


def test_sampled_tokens_depend_on_the_seed_alone(device: torch.device) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 4}
    assert generated(device, True, **options) == generated(device, True, **options)
    assert generated(device, True, **options) != generated(device, True, **{**options, "seed": 5})
