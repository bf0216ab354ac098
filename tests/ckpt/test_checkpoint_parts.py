"""Units of titan-ckpt, each on its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.one_of_many import OneOfMany
from titan_ckpt.contents import state
from titan_ckpt.contents.state import restore_schedule, schedule_state
from titan_ckpt.format.catalogue import steps_in
from titan_ckpt.format.chunks import bytes_of
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import check_chunk
from titan_ckpt.format.stored import BrokenCheckpoint, Chunk, chunk_digest
from titan_ckpt.resume.optimizer_restore import restore_rates
from titan_ckpt.save.retention import to_remove


@pytest.mark.parametrize(("mesh", "seed"), [({"dp_shard": 4}, 22), ({"tp": 4}, 7)], ids=["same mesh", "other mesh"])
def test_each_rank_restores_its_own_generators(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], seed: int) -> None:
    world = OneOfMany({"dp_shard": 4}, at={"dp_shard": 2})
    object.__setattr__(world, "rank", 2)
    ignore = lambda *arguments: None  # noqa: E731
    context: Any = SimpleNamespace(
        state=SimpleNamespace(loader=SimpleNamespace(load_state_dict=ignore), lr_scheduler=None),
        world=world,
        lifecycle=SimpleNamespace(save_state=dict, restore_state=ignore),
    )
    monkeypatch.setattr(state, "restore_schedule", ignore)
    saved: dict[str, Any] = {"loader": {}, "lr_scheduler": {}, "step": 5, "tokens_seen": 9, "tokens_by_dataset": {}}
    of_ranks = {11: [0, 2, 3, 4], 20: [2, 3]}  # relative to the data rank
    saved |= {
        "generators": [{"python": own, "cpu": own, "ranks": ranks} for own, ranks in of_ranks.items()],
        "observers": {},
    }
    saved["mesh"] = {**dict.fromkeys(context.world.plan.degrees, 1), **mesh}
    torch.manual_seed(7)
    state.apply(saved, context, (), new_schedule=False)
    assert torch.initial_seed() == seed and context.state.step == 5
    saved["mesh"], saved["generators"] = dict(world.plan.degrees), saved["generators"][:1]
    with pytest.raises(ValueError, match="it has 0 states of the random generators of rank 2, expected one"):
        state.apply(saved, context, (), new_schedule=False)


@pytest.mark.parametrize(
    ("latest", "every", "removed"),
    [(0, 0, []), (2, 0, [6, 4, 3, 2]), (1, 0, [8, 6, 4, 3, 2]), (2, 3, [4, 2]), (2, 4, [6, 3, 2]), (9, 0, [])],
)
def test_the_retention_policy(latest: int, every: int, removed: list[int]) -> None:
    assert to_remove([3, 9, 2, 8, 6, 4], latest, every) == removed


def test_steps_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-2", "step-x", "other", "step-11.old"):
        (tmp_path / name).mkdir()
    assert steps_in(Folder(str(tmp_path))) == [10, 9, 2]
    assert steps_in(Folder(str(tmp_path / "nowhere"))) == []


def test_a_chunk_is_verified_by_its_checksum() -> None:
    data = bytes(bytes_of(torch.arange(6, dtype=torch.int16).view(2, 3).T))
    assert data == b"\0\0\3\0\1\0\4\0\2\0\5\0"  # in row-major order, whatever the strides
    chunk = Chunk((0, 0), (3, 2), "data-00000.bin", 0, 12, chunk_digest("weight", "int16", (0, 0), (3, 2), data))
    check_chunk("weight", "int16", chunk, data)
    moved = replace(chunk, offset=(3, 0))
    for claimed in (("bias", "int16", chunk), ("weight", "uint16", chunk), ("weight", "int16", moved)):
        with pytest.raises(BrokenCheckpoint, match=r"data-00000\.bin is damaged"):
            check_chunk(*claimed, data)
    for damaged in (data[:-1], data + b"\0", b"\1" + data[1:]):
        with pytest.raises(BrokenCheckpoint, match=r"data-00000\.bin is damaged in weight"):
            check_chunk("weight", "int16", chunk, damaged)


def test_a_restored_schedule_reports_the_rates_of_its_groups() -> None:
    def build() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.8, 0.2)])
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    alone: Any = SimpleNamespace(gather=lambda value: [value])
    optimizer, schedule = build()
    optimizer.step()
    schedule.step()
    saved = schedule_state(schedule, alone)
    again, restored = build()
    for group, rate in zip(again.param_groups, (0.4, 0.1), strict=True):
        group["lr"] = rate  # as restore_rates does
    restore_schedule(restored, saved, recompute=False)
    assert restored.get_last_lr() == [0.4, 0.1]
    assert restored.last_epoch == 1


def test_a_changed_learning_rate_scales_the_saved_one() -> None:
    weight, bias = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.2}, {"params": [bias], "lr": 0.3}])
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # as a schedule sets it
    # Saved after a warmup to 0.4 of an initial rate of 0.1; the bias kept its initial rate, of which 0.5 was reached.
    groups = [{"now": {"lr": 0.04, "initial_lr": 0.1}}, {"now": {"lr": 0.15, "initial_lr": 0.3}}]
    saved = {"groups": groups, "group_of": {"weight": 0, "bias": 1}}
    restore_rates(optimizer, {weight: "weight", bias: "bias"}, saved, excluded=())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.08, 0.15])
    restore_rates(optimizer, {weight: "weight", bias: "bias"}, saved, excluded=["bias"])
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.3 * 0.4)  # restores nothing, and follows the schedule
