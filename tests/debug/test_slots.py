"""Values that transforms leave for titan-debug in its slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.transforms import transform
from titan_core.api import ModelPart, UserError
from titan_core.loop.world import join_world
from titan_core.model.build import build_parts
from titan_debug.slots import FLOPS
from titan_testing.jobs import make_job


def part_after(name: str) -> ModelPart:
    job = replace(make_job("tiny", {"job.device": "cpu"}), transforms=(transform(name),))
    with join_world(job) as world:
        (part,) = build_parts(job, world.mesh, world.device)
    return part


def test_a_value_that_the_slot_accepts_reaches_its_reader() -> None:
    assert part_after("flops_in_float8").entries(FLOPS) == {"blocks.0": (torch.float8_e4m3fn, 6.0)}


def test_a_slot_that_its_package_does_not_have_is_refused() -> None:
    message = r"unknown_slot': it fills the slot 'titan_debug.flop', which titan_debug does not have; did you mean"
    with pytest.raises(UserError, match=message):
        part_after("unknown_slot")


def test_a_wrong_value_is_refused_with_the_name_of_its_writer() -> None:
    message = r"wrong_value': .* for module 'blocks.0' is wrong: it must be a torch.dtype and a number of FLOPs, not 1"
    with pytest.raises(UserError, match=message):
        part_after("wrong_value")
