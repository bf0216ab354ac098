"""Sizes of a model follow from its layout's rules and its operations."""

from __future__ import annotations

import pytest

from harness.planned import CHOSEN, DIM, EXPERTS, HIDDEN, SIZES, decoder_sizes
from titan_core.api import Router
from titan_simulate.plan.model_sizes import keys_of


def test_sizes_follow_from_the_rules() -> None:
    block = SIZES.units["blocks.3"]
    assert block.divided == 2 * DIM**2
    assert block.experts == EXPERTS * 2 * DIM * HIDDEN
    assert block.replicated == DIM
    assert [keys_of(mixer, DIM) for mixer in block.mixers] == [2 * DIM * 4 // 16]
    assert SIZES.num_experts == (EXPERTS,)
    # The operations per token tell how many experts a token passes through.
    assert block.routed == pytest.approx(CHOSEN * DIM, rel=0.01)


def test_a_router_tells_how_many_experts_a_token_passes_through() -> None:
    attention = {"blocks.*.attention": Router(experts=EXPERTS, per_token=3), "embed": Router(experts=EXPERTS, per_token=1)}
    block = decoder_sizes(routers=attention).units["blocks.3"]
    assert block.routed == 3 * DIM
    assert [matrix.copies for matrix in block.matrices if matrix.copies != 1] == [3, 3]


def test_experts_are_matrices_of_their_own() -> None:
    block = SIZES.units["blocks.0"]
    assert sum(number for _, _, number in block.weights) == 2 + 2 * EXPERTS
    assert {(rows, columns) for rows, columns, number in block.weights if number == EXPERTS} <= {
        (DIM, HIDDEN),
        (HIDDEN, DIM),
    }
