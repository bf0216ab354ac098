"""The verdict over dumps: who is behind, who disagrees, who failed by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.made_dumps import ASLEEP, ITEM, dump, entry, of_mesh, raised, verdict
from titan_core.api.errors import UserError
from titan_core.cli.main import main
from titan_debug.flight.analysis import analyse
from titan_debug.flight.dump import Entry, write_dump
from titan_debug.flight.read import read_dumps


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_sleeps_is_named_with_its_place_and_what_waits_for_it(backend: str) -> None:
    waits = dump(0, [entry(1, backend=backend), entry(2, done=False, backend=backend)])
    found = verdict(waits, dump(1, [entry(1, backend=backend)], stack=ASLEEP))
    assert (found.kind, found.culprits, found.step) == ("behind", [1], 3)
    assert found.verdict == (
        "rank 1 is behind in step 3: it is in time.sleep(60), at /home/me/hooks.py:12 in titan_step_start; "
        "rank 0 has waited 1898.0 s for it in all_reduce, number 2 of all ranks"
    )
    assert "all_reduce of [4] float32, called at /home/me/train.py:7 in step" in found.details[0]


def test_of_overlapping_groups_the_rank_at_the_end_of_the_chain_is_the_culprit() -> None:
    """0 waits for 1 in one group, 1 waits for 2 in another, 2 sleeps; 3 waits for 2 as well."""
    groups: dict[str, Sequence[int]] = {"tp": (0, 1), "dp_shard": (1, 2, 3)}
    found = verdict(
        dump(0, [entry(5, done=False, group="tp")], world_size=4, groups=groups),
        dump(1, [entry(4, group="tp"), entry(9, done=False, group="dp_shard")], world_size=4, groups=groups),
        dump(2, [entry(8, group="dp_shard")], world_size=4, groups=groups, stack=ASLEEP),
        dump(3, [entry(9, done=False, group="dp_shard")], world_size=4, groups=groups),
    )
    assert (found.kind, found.culprits) == ("behind", [2])
    assert "ranks 1, 3 have waited 1891.0 s for it in all_reduce, number 9 of dp_shard (ranks 1-3)" in found.verdict
    assert "waits for rank 1 in all_reduce, number 5 of tp (ranks 0-1)" in found.ranks[0].state


def test_groups_entered_in_different_orders_are_a_circle() -> None:
    groups: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 1)}
    found = verdict(
        dump(0, [entry(1, done=False, group="a")], groups=groups), dump(1, [entry(1, done=False, group="b")], groups=groups)
    )
    assert (found.kind, found.culprits) == ("circle", [0, 1])
    assert "number 1 of a (ranks 0-1)" in found.verdict and "number 1 of b (ranks 0-1)" in found.verdict


def test_ranks_that_call_different_operations_are_distinguished_from_the_majority() -> None:
    found = verdict(*(dump(rank, [entry(1), entry(2, done=False)], world_size=4) for rank in (0, 1, 3)),
                    dump(2, [entry(1), entry(2, done=False, op="broadcast")], world_size=4))  # fmt: skip
    assert (found.kind, found.culprits) == ("mismatch", [2])
    assert "the operation of collective number 2 of all ranks in step 3" in found.verdict
    assert "ranks 0-1, 3 call all_reduce of [4] float32" in found.verdict
    assert "rank 2 calls broadcast" in found.verdict


@pytest.mark.parametrize(("other", "what"), [(entry(2, size=(5,)), "shape"), (entry(2, dtype="BFloat16"), "type")])
def test_shapes_and_types_that_do_not_fit_are_found_before_what_follows(other: Entry, what: str) -> None:
    """The ranks hang later than they went apart."""
    found = verdict(dump(0, [entry(1), entry(2), entry(3, done=False)]), dump(1, [entry(1), other], stack=ASLEEP))
    assert (found.kind, found.culprits) == ("mismatch", [0, 1])
    assert f"the {what} of collective number 2" in found.verdict


@pytest.mark.parametrize("op", ["all_to_all", "gather", "scatter"])
def test_ranks_may_give_different_amounts_where_that_is_allowed(op: str) -> None:
    found = verdict(dump(0, [entry(1, op=op, size=(3,))]), dump(1, [entry(1, op=op, size=(5,))]))
    assert found.kind == "nothing"


def test_views_of_as_many_numbers_fit() -> None:
    assert verdict(dump(0, [entry(1, size=(2, 4))]), dump(1, [entry(1, size=(8,))])).kind == "nothing"


def test_a_rank_that_raised_by_itself_is_the_culprit_and_not_those_that_lost_it() -> None:
    """gloo lets go of what failed: the victim's last collective counts as the one that it waited in."""
    found = verdict(
        dump(0, [entry(1), entry(2)], failure=raised("RuntimeError", follows=True, time=1999.0)),
        dump(1, [entry(1)], stack=ASLEEP, failure=raised("ValueError", follows=False)),
    )
    assert (found.kind, found.culprits) == ("raised", [1])
    assert found.verdict.startswith(
        "rank 1 raised ValueError in step 3, at /home/me/hooks.py:12 in titan_step_start: it went"
    )
    assert found.verdict.endswith("rank 0 was left waiting in all_reduce, number 2 of all ranks")


def test_a_rank_without_a_dump_is_named() -> None:
    found = verdict(dump(0, [entry(1), entry(2)], failure=raised("RuntimeError", follows=True)))
    assert (found.kind, found.culprits) == ("missing", [1])
    assert "rank 1 left no dump in step 3" in found.verdict
    assert found.ranks[1].state == "left no dump"


def test_a_collective_that_all_have_joined_blames_nobody() -> None:
    found = verdict(*(dump(rank, [entry(4, done=False, backend="nccl")]) for rank in (0, 1)))
    assert (found.kind, found.culprits) == ("all joined", [])
    assert "look at the network and the devices" in found.verdict


def test_where_nothing_was_recorded_the_stacks_decide() -> None:
    """gloo records neither sends nor receives."""
    found = verdict(dump(0, []), dump(1, [], stack=ASLEEP))
    assert (found.kind, found.culprits) == ("elsewhere", [1])


def test_older_collectives_that_the_recorder_has_dropped_are_no_difference() -> None:
    early, late = [entry(seq) for seq in range(1, 9)], [entry(seq) for seq in range(6, 9)]
    assert verdict(dump(0, early), dump(1, late)).kind == "nothing"


def test_damaged_files_and_earlier_attempts_are_reported_and_left_out(tmp_path: Path) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)], world_size=4))
    write_dump(tmp_path, dump(1, [entry(1)], world_size=4, stack=ASLEEP))
    write_dump(tmp_path, dump(2, [entry(1)], world_size=4, attempt=900.0))
    write_dump(tmp_path, dump(3, [entry(1)], world_size=4))
    torn = tmp_path / "rank-3.json"
    torn.write_bytes(torn.read_bytes()[:-100])
    dumps = read_dumps(tmp_path)
    assert [one.rank for one in dumps.dumps] == [0, 1]
    assert dumps.missing == [2, 3]
    assert any("rank-3.json is left out" in note for note in dumps.notes)
    assert any("earlier attempt" in note and "rank 2" in note for note in dumps.notes)
    found = analyse(dumps)
    assert (found.kind, found.culprits) == ("behind", [1, 2, 3])  # nobody knows what holds up rank 1
    assert found.verdict.startswith("rank 1 is behind in step 3: it is in time.sleep(60)")
    assert found.verdict.endswith("; ranks 2-3 left no dump: they were killed, or their files are not here")


def test_a_dump_of_an_earlier_step_says_nothing_of_this_one(tmp_path: Path) -> None:
    """Asked for at step 1; rank 1 was killed at step 9 and could not write another."""
    write_dump(tmp_path, dump(0, [entry(40)], step=9, failure=raised("RuntimeError", follows=True)))
    write_dump(tmp_path, dump(1, [entry(3)], step=1, stack=ASLEEP))
    dumps = read_dumps(tmp_path)
    assert any("it is of step 1, others are of step 9" in note for note in dumps.notes)
    assert analyse(dumps).kind == "missing"


def test_a_process_that_died_in_an_extension_has_left_its_stacks(tmp_path: Path) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2)], failure=raised("RuntimeError", follows=True)))
    (tmp_path / "rank-1.stacks.txt").write_text(
        "rank 1 of 2, attempt 1000.0, process 7 on node, main thread 0x00000000000000ff\n"
        "Fatal Python error: Segmentation fault\n\n"
        "Thread 0x00000000000000aa (most recent call first):\n  <no Python frame>\n\n"
        "Current thread 0x00000000000000ff (most recent call first):\n"
        '  File "/home/me/kernels.py", line 5 in launch\n  File "/home/me/train.py", line 9 in step\n'
    )
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("died", [1])
    assert "rank 1 died (Segmentation fault) at /home/me/kernels.py:5 in launch in step 3" in found.verdict


def test_stacks_of_a_process_that_is_well_are_no_dump(tmp_path: Path) -> None:
    header = "rank 0 of 2, attempt 1000.0, process 7 on node, main thread 0x00000000000000ff\n"
    (tmp_path / "rank-0.stacks.txt").write_text(header)
    with pytest.raises(UserError, match="there are no dumps here"):
        read_dumps(tmp_path)


def test_the_command_tells_it_in_words_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], stack=ASLEEP))
    assert main(["flight", "analyse", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("rank 1 is behind in step 3: it is in time.sleep(60)")
    assert main(["flight", "analyse", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["culprits"], found["ranks"][1]["rank"]) == ("behind", [1], 1)
    assert main(["flight", "analyse", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [True, False])
def test_what_a_killed_rank_leaves_waiting_is_not_behind(fails: bool) -> None:
    """Rank 3 is killed: 2 and 1 wait for it, 0 waits for 2. With gloo they fail."""
    state: dict[str, Any] = {"failure": raised("RuntimeError", follows=True)} if fails else {}
    found = verdict(
        of_mesh(0, [entry(1, group="tp01"), entry(4, done=fails, group="dp02")], **state),
        of_mesh(1, [entry(1, group="tp01"), entry(4, done=fails, group="dp13")], **state),
        of_mesh(2, [entry(3, group="dp02"), entry(7, done=fails, group="tp23")], **state),
    )
    assert (found.kind, found.culprits) == ("missing", [3])
    assert not any("behind" in line for line in [found.verdict, *found.details])


def test_one_that_has_not_noticed_yet_that_a_rank_was_killed_is_not_named_alone() -> None:
    """1 computes on, and 0 waits for it as it would on any day."""
    found = verdict(
        of_mesh(0, [entry(5, done=False, group="tp01")]),
        of_mesh(1, [entry(4, group="tp01"), entry(4, group="dp13")], stack=ASLEEP),
        of_mesh(2, [entry(7, group="tp23")], failure=raised("RuntimeError", follows=True)),
    )
    assert (found.kind, found.culprits) == ("missing", [1, 3])
    assert found.verdict.startswith(
        "rank 3 left no dump in step 3: it was killed, or its files are not here; rank 2 was left"
    )
    assert "; rank 1 is behind: it is in time.sleep(60)" in found.verdict


def test_ranks_that_nccl_ends_after_a_timeout_have_not_died_by_themselves() -> None:
    stuck = [dump(rank, [entry(2, done=False, backend="nccl")], died="Aborted") for rank in (0, 1)]
    found = verdict(*stuck)
    assert (found.kind, found.culprits) == ("all joined", [])
    assert not any("died" in line for line in [found.verdict, *found.details])
    written_by_faulthandler = replace(stuck[1], entries=[], groups=[], recorded=False, step=-1)
    assert verdict(stuck[0], written_by_faulthandler).kind != "died"


def test_all_that_died_by_themselves_are_named() -> None:
    died = [dump(rank, [entry(2, done=False, backend="nccl")], world_size=3, died="Segmentation fault") for rank in (1, 2)]
    found = verdict(dump(0, [entry(2, done=False, backend="nccl")], world_size=3, died="Aborted"), *died)
    assert (found.kind, found.culprits) == ("died", [1, 2])
    assert found.verdict.startswith("rank 1 died (Segmentation fault) ") and "; rank 2 died" in found.verdict
    assert any("also: no rank is behind" in line and "look at the network" in line for line in found.details)


def test_a_rank_within_a_collective_that_all_have_joined_is_not_behind_in_another() -> None:
    """The network between 0 and 1 is down; 2 waits for 0."""
    groups: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 2)}
    stuck = entry(3, done=False, group="a", backend="nccl")
    found = verdict(
        dump(0, [entry(1, group="b", backend="nccl"), stuck], world_size=3, groups=groups, stack=ITEM),
        dump(1, [stuck], world_size=3, groups=groups, stack=ITEM),
        dump(2, [entry(2, done=False, group="b", backend="nccl")], world_size=3, groups=groups, stack=ITEM),
    )
    assert (found.kind, found.culprits) == ("all joined", [])
