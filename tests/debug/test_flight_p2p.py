"""Which ranks wait for which in the sends and receives of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.made_dumps import ASLEEP, ITEM, TORCH, dump, entry, of_mesh, verdict
from titan_debug.flight.dump import Entry, Frame

IN_RECV = [Frame(TORCH, 2500, "recv"), Frame("/home/me/stage.py", 31, "forward", "dist.recv(x, 3)")]


def test_a_pipeline_stage_that_waits_for_another_is_not_behind() -> None:
    """gloo does not record receives. Rank 0 waits for rank 1, which receives from the sleeping rank 3; rank 2 receives from
    rank 0."""
    found = verdict(
        of_mesh(0, [entry(4, done=False, group="tp01")]),
        of_mesh(1, [entry(3, group="tp01")], stack=IN_RECV),
        of_mesh(2, [], stack=IN_RECV),
        of_mesh(3, [], stack=ASLEEP),
    )
    assert (found.kind, found.culprits) == ("elsewhere", [3])
    assert "rank 3 is outside all collectives in step 3: it is in time.sleep(60)" in found.verdict
    assert "rank 0 waits for rank 1 in all_reduce #4 on tp01 (ranks 0-1)" in found.details


def test_no_rank_is_blamed_if_all_wait_and_some_waits_are_not_recorded() -> None:
    found = verdict(dump(0, [entry(4, done=False)]), dump(1, [entry(3)], stack=IN_RECV))
    assert (found.kind, found.culprits) == ("not recorded", [])
    assert "which rank holds up the others in step 3: rank 0 waits for rank 1 in all_reduce #4" in found.verdict


def p2p(op: str, done: bool, group: str = "pp") -> Entry:
    return replace(entry(1, done, op, group, backend="nccl"), p2p=True)


def test_sends_and_receives_that_nccl_records_are_followed() -> None:
    groups: dict[str, Sequence[int]] = {"pp": (0, 2), "dp": (2, 1)}
    found = verdict(
        dump(0, [], world_size=3, groups=groups, stack=ASLEEP),
        dump(1, [entry(2, done=False, group="dp", backend="nccl")], world_size=3, groups=groups, stack=ITEM),
        dump(
            2, [entry(1, group="dp", backend="nccl"), p2p("recv 1<-0", done=False)], world_size=3, groups=groups, stack=ITEM
        ),
    )
    assert (found.kind, found.culprits) == ("behind", [0])
    assert "rank 2 has waited" in found.verdict and "for it in recv 1<-0 #1 on pp (ranks 0, 2)" in found.verdict


@pytest.mark.parametrize("done", [True, False])
def test_the_closing_entry_of_a_batch_shows_whether_its_sends_and_receives_are_done(done: bool) -> None:
    groups: dict[str, Sequence[int]] = {"pp": (0, 1)}
    batch = [p2p("send 0->1", done=False), p2p("recv 0<-1", done=False), p2p("coalesced", done)]
    found = verdict(dump(0, batch, groups=groups, stack=ITEM), dump(1, [], groups=groups, stack=ASLEEP))
    assert (found.kind, found.culprits) == (("nothing", []) if done else ("behind", [1]))


def test_sends_and_receives_that_both_sides_have_started_blame_no_rank() -> None:
    groups: dict[str, Sequence[int]] = {"pp": (0, 1)}
    found = verdict(
        dump(0, [p2p("send 0->1", done=False)], groups=groups, stack=ITEM),
        dump(1, [p2p("recv 1<-0", done=False)], groups=groups, stack=ITEM),
    )
    assert (found.kind, found.culprits) == ("all joined", [])


def test_user_code_called_from_torch_distributed_does_not_count_as_waiting() -> None:
    """For example, code that a pipeline schedule calls."""
    stage = Frame("/env/lib/python3.11/site-packages/torch/distributed/pipelining/stage.py", 700, "forward_one_chunk")
    found = verdict(dump(0, [entry(1), entry(2, done=False)]), dump(1, [entry(1)], stack=[*ASLEEP, stage]))
    assert (found.kind, found.culprits) == ("behind", [1])
