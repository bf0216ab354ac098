"""The time of the actions of a pipeline's stages, from a trace, and of stages that were not simulated."""

from __future__ import annotations

import pytest

pytest.importorskip("titan_simulate")

from titan_simulate.estimate.figures import per_microbatch, stands_for
from titan_simulate.estimate.pipeline import stage_times
from titan_simulate.estimate.work import ALL, BLOCKS, Action, Kind, Work


def stage(blocks: float, others: float = 0.0, **split: float) -> dict[str, dict[str, float]]:
    """Return the times of a stage: forward, a backward pass that takes twice as long, and those in ``split``."""
    of_blocks = {"F": blocks, "B": 2 * blocks, "I": 0.0, "W": 0.0, **split}
    more = {"F": others, "B": 2 * others, "I": 0.0, "W": 0.0}
    return {BLOCKS: of_blocks, ALL: {kind: of_blocks[kind] + more[kind] for kind in of_blocks}}


def test_stages_between_the_ends_have_no_embedding_and_no_head_and_the_time_of_their_blocks() -> None:
    found = stage_times({0: stage(3.0, 0.5), 3: stage(1.0, 4.0)}, [3.0, 5.0, 4.0, 1.0])
    assert found["F"] == pytest.approx([3.5, 5.0, 4.0, 5.0])
    assert found["B"] == pytest.approx([7.0, 10.0, 8.0, 10.0])


def test_simulated_stages_in_the_middle_are_like_the_others_there() -> None:
    known = {0: stage(9.0), 1: stage(2.0), 2: stage(4.0), 5: stage(9.0)}
    assert stage_times(known, [1.0] * 6)["F"] == pytest.approx([9.0, 2.0, 4.0, 3.0, 3.0, 9.0])


def test_the_first_stage_does_not_say_how_long_others_take_for_the_gradients_of_their_inputs() -> None:
    known = {0: stage(1.0, I=0.5, W=2.0), 2: stage(1.0, I=1.1, W=0.9)}
    found = stage_times(known, [1.0, 1.0, 1.0])
    assert (found["I"], found["W"]) == ([0.5, 1.1, 1.1], [2.0, 0.9, 0.9])


def work(name: str, action: Action | None = None, phase: str = "forward", module: str = "layers.0") -> Work:
    return Work(Kind.COLLECTIVE, name, phase, module, "main", (), group="dp", bytes=8, action=action, unit=module)


def test_gathers_that_happen_once_are_not_repeated_with_each_microbatch() -> None:
    trace = [work("c10d::_allgather_base_"), work("fsdp::chunk_cat", phase="backward"), work("aten::mm")]
    repeated = [*trace[1:], work("c10d::_allgather_base_", module="layers.1")] * 2
    assert per_microbatch([trace[0], *repeated], 2) == [False] + [True] * 6
    assert per_microbatch([work("aten::add_"), work("aten::mul_", phase="optimizer")], 2) == [True, False]


def test_later_microbatches_stand_for_others_which_add_to_gradients_too() -> None:
    one = [work("aten::embedding", module="embed"), work("aten::mm"), work("aten::mm", phase="backward")]
    one += [work("aten::mm", phase="backward", module="embed")]
    trace = [*one, *one, work("aten::add_", phase="backward"), work("aten::sqrt", phase="norm")]
    assert stands_for(trace, per_microbatch(trace, 2), 2, scale=4.0) == [1.0] * 4 + [7.0] * 5 + [1.0]
    assert stands_for(trace, per_microbatch(trace, 3), 3, scale=4.0) == [4.0] * 9 + [1.0]


def test_what_computes_outside_of_the_actions_of_a_pipeline_is_not_repeated() -> None:
    assert per_microbatch([work("aten::stack"), work("aten::mm", ("F", 0, 0))], 1) == [False, True]
