"""A checkpoint contains the complete state of optimizer and schedule, or the job is refused before its first step."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.odd_optimizers import train_in
from titan_ckpt.contents.optimizer_state import group_values, state_of
from titan_ckpt.contents.plain_values import Unsaveable, decode, encode, require_same_type
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool


@pytest.mark.parametrize(("optimizer", "schedule"), [("build_odd", None), (None, "build_exponential")])
def test_the_complete_state_is_restored(tmp_path: Path, optimizer: str | None, schedule: str | None) -> None:
    whole = train_in(str(tmp_path), {"job.dump_folder": "whole"}, optimizer, schedule)
    first = train_in(str(tmp_path), {"training.stop_at_step": 3}, optimizer, schedule)
    second = train_in(str(tmp_path), {}, optimizer, schedule)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.final[name], tensor) for name, tensor in whole.final.items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"), [pytest.param((4, {}), (2, {}), marks=pytest.mark.full), ((2, {}), (1, {}))], ids=str
)
def test_the_state_is_restored_on_another_mesh(
    gloo: GlooPool, tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    (whole,) = gloo.run(1, train_in, str(tmp_path), {"job.dump_folder": "whole"})
    gloo.run(before[0], train_in, str(tmp_path), {**before[1], "training.stop_at_step": 3})
    second = gloo.run(after[0], train_in, str(tmp_path), after[1])[0]
    assert second.losses == pytest.approx(whole.losses[3:], rel=1e-5)
    for name, tensor in whole.final.items():
        torch.testing.assert_close(second.final[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("optimizer", "schedule", "message"),
    [
        ("build_secretive", None, r"optimizer\..*\.secret: is a builtins.object, which cannot be represented in JSON"),
        ("build_with_an_object_in_a_group", None, r"optimizer.groups.hook: is a builtins.builtin_function_or_method"),
        (None, "build_with_an_object", r"lr_scheduler.notes: is a builtins.object"),
        (None, "build_bumpy", r"lr_scheduler.lr_lambdas: contains a callable with state"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, optimizer: str | None, schedule: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_in(str(tmp_path), {}, optimizer, schedule)
    assert not list(tmp_path.glob("outputs/*/metrics.jsonl"))
    assert not list(tmp_path.glob("outputs/*/checkpoint/step-*"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2.5, float("-inf"), "text", [1, [2.0]], (1, (2,)), {"a": {"b": (1,)}}, {1: "x", "y": 2},
        Counter({3: 2}), OrderedDict([("z", 1), ("a", 2)]), {4, 5}, frozenset("ab"), torch.bfloat16, {}, (), {"$tuple": 1},
    ],
    ids=lambda value: "frozenset" if isinstance(value, frozenset) else repr(value),  # the order varies
)  # fmt: skip
def test_plain_values_are_decoded_exactly(value: Any) -> None:
    back = decode(encode(value, "value"))
    assert back == value
    assert type(back) is type(value)


def test_small_tensors_in_plain_values_are_decoded_exactly() -> None:
    for value in (torch.tensor(0.1), torch.tensor([[1, 2]]), torch.tensor([1.5], dtype=torch.bfloat16)):
        back = decode(encode(value, "value"))
        assert back.dtype == value.dtype
        assert torch.equal(back, value)
    with pytest.raises(Unsaveable, match="x is a tensor of 100 elements"):
        encode(torch.zeros(100), "x")


@pytest.mark.parametrize(
    "value",
    [object(), 1j, b"x", {"a": print}, [object()], float, {object(): 1}],
    ids=["object", "complex", "bytes", "function", "list of objects", "class", "object as key"],
)
def test_values_that_json_cannot_represent_are_refused(value: Any) -> None:
    with pytest.raises(Unsaveable, match=r"^value"):
        encode(value, "value")


@pytest.mark.parametrize(
    "damaged", [{"$float": "x"}, {"$tuple": 3}, {"$dict": [1]}, {"$dtype": "load"}, {"$tensor": 1}, {"$new": 1}], ids=str
)
def test_damaged_plain_values_are_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match=r"\$"):
        decode(damaged)


@pytest.mark.parametrize("value", [(True, 0.95), (0.9,), (0.9, None), (0.9, "0.95"), [0.9, 0.95]], ids=str)
def test_values_of_another_type_do_not_replace_a_tuple(value: Any) -> None:
    require_same_type((0, 0.5), (0.9, 0.95), "betas")
    with pytest.raises(ValueError, match=r"^betas(\.\d)? is .*, which cannot replace"):
        require_same_type(value, (0.9, 0.95), "betas")


def test_an_unsupported_tensor_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.state[parameter]["codes"] = torch.zeros(3).to_sparse()
    with pytest.raises(Unsaveable, match=r"optimizer.w.codes is a tensor with torch.float32 and torch.sparse_coo"):
        state_of({parameter: "w"}, optimizer, group_values(optimizer))


class _World:
    """A world with one other rank, whose values are those of this rank except for one."""

    size, replica = 2, 0

    def __init__(self, change: Any) -> None:
        self.change = change

    def gather(self, value: Any) -> list[Any]:
        import copy

        other = copy.deepcopy(value)
        return [value, "another digest" if isinstance(value, str) else self.change(other)]


def test_a_value_that_differs_between_ranks_is_refused_by_name() -> None:
    from titan_ckpt.contents.optimizer_state import state_of_all

    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.state[parameter] |= {"count": 1, "norm": torch.tensor(2.0)}
    state = state_of({parameter: "w"}, optimizer, group_values(optimizer))
    assert set(state.replicas) == {"optimizer.w.norm"}

    def other_count(both: Any) -> Any:
        both[0]["parameters"]["w"]["count"] = 2
        return both

    def other_norm(both: Any) -> Any:
        both[1]["optimizer.w.norm"] = "3.0"
        return both

    assert state_of_all(state, _World(lambda both: both))["parameters"]["w"]["count"] == 1  # type: ignore[arg-type]
    with pytest.raises(Unsaveable, match=r"^optimizer.w differs between the ranks"):
        state_of_all(state, _World(other_count))  # type: ignore[arg-type]
    with pytest.raises(Unsaveable, match=r"^optimizer.w.norm differs between the ranks"):
        state_of_all(state, _World(other_norm))  # type: ignore[arg-type]
