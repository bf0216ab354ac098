"""Blocks of a model that are tried once, because they are built alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from titan_core.api import ModelLayout
from titan_core.model.stand_in import first_alike

LAYOUT = ModelLayout(
    num_blocks=4, dim=8, vocab_size=16, max_seq_len=64, embedding=("embed",), blocks="layers", head=("out",), rules={}
)


class Attention(nn.Linear):
    """With a number that its block gives it."""

    def __init__(self, number: object) -> None:
        super().__init__(8, 8)
        self.number = number


def distinct(number: Callable[[int], object]) -> int:
    """Return how many kinds of blocks a model has whose attention has a ``number``, of the position of its block."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(Attention(number(place))) for place in range(4))})
    return len(set(first_alike(model, LAYOUT).values()))


@pytest.mark.parametrize(
    ("number", "kinds"),
    [
        (lambda place: place, 1),  # as modules of transformers have it in layer_idx
        (lambda place: place % 2, 2),
        (lambda place: max(place, 1), 3),
        (float, 4),
        (lambda place: place == 1, 2),
    ],
    ids=["its place", "alternates", "its place, but for one", "a factor", "a choice"],
)
def test_blocks_are_alike_if_only_their_place_differs(number: Callable[[int], object], kinds: int) -> None:
    assert distinct(number) == kinds


def test_of_two_blocks_a_number_may_be_a_choice() -> None:
    blocks = nn.ModuleList(nn.Sequential(Attention(place)) for place in range(2))
    assert len(set(first_alike(nn.ModuleDict({"layers": blocks}), LAYOUT).values())) == 2
