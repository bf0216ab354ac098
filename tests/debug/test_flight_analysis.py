"""The verdict over dumps: which rank is late, which ranks disagree, and which rank is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.made_dumps import ASLEEP, ITEM, dump, entry, of_mesh, verdict
from titan_core.cli.main import main
from titan_debug.flight.diagnose import analyse
from titan_debug.flight.dump import Entry, read_dumps, write_dump


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_sleeps_is_named_with_its_place_and_what_waits_for_it(backend: str) -> None:
    waits = dump(0, [entry(1, backend=backend), entry(2, done=False, backend=backend)])
    found = verdict(waits, dump(1, [entry(1, backend=backend)], stack=ASLEEP))
    assert (found.kind, found.culprits, found.step) == ("behind", [1], 3)
    assert found.verdict == (
        "rank 1 is behind in step 3: it is in time.sleep(60) at /home/me/hooks.py:12 in titan_step_start; "
        "rank 0 has waited 1898.0 s for it in all_reduce #2 on all ranks"
    )
    assert "all_reduce of [4] float32 at /home/me/train.py:7 in step" in found.details[0]


def test_a_rank_with_several_pending_collectives_waits_in_the_first() -> None:
    found = verdict(dump(0, [entry(2, done=False), entry(3, done=False)]), dump(1, [entry(1)], stack=ASLEEP))
    assert found.verdict.endswith("rank 0 has waited 1898.0 s for it in all_reduce #2 on all ranks")


def test_in_overlapping_groups_the_end_of_the_chain_is_the_culprit() -> None:
    """Rank 0 waits for rank 1 in one group, ranks 1 and 3 wait for rank 2 in another, and rank 2 sleeps."""
    groups: dict[str, Sequence[int]] = {"tp": (0, 1), "dp_shard": (1, 2, 3)}
    found = verdict(
        dump(0, [entry(5, done=False, group="tp")], world_size=4, groups=groups),
        dump(1, [entry(4, group="tp"), entry(9, done=False, group="dp_shard")], world_size=4, groups=groups),
        dump(2, [entry(8, group="dp_shard")], world_size=4, groups=groups, stack=ASLEEP),
        dump(3, [entry(9, done=False, group="dp_shard")], world_size=4, groups=groups),
    )
    assert (found.kind, found.culprits) == ("behind", [2])
    assert "ranks 1, 3 have waited 1891.0 s for it in all_reduce #9 on dp_shard (ranks 1-3)" in found.verdict
    assert "waits for rank 1 in all_reduce #5 on tp (ranks 0-1)" in found.ranks[0].state


def test_groups_entered_in_different_orders_are_a_deadlock() -> None:
    groups: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 1)}
    found = verdict(
        dump(0, [entry(1, done=False, group="a")], groups=groups), dump(1, [entry(1, done=False, group="b")], groups=groups)
    )
    assert (found.kind, found.culprits) == ("circle", [0, 1])
    assert found.verdict.startswith("ranks 0-1 are deadlocked in step 3: rank 0 waits for rank 1 in")
    assert "#1 on a (ranks 0-1)" in found.verdict and "#1 on b (ranks 0-1)" in found.verdict


def test_ranks_that_call_different_operations_are_distinguished_from_the_majority() -> None:
    found = verdict(*(dump(rank, [entry(1), entry(2, done=False)], world_size=4) for rank in (0, 1, 3)),
                    dump(2, [entry(1), entry(2, done=False, op="broadcast")], world_size=4))  # fmt: skip
    assert (found.kind, found.culprits) == ("mismatch", [2])
    assert "the operation of collective #2 on all ranks in step 3" in found.verdict
    assert "ranks 0-1, 3 called all_reduce of [4] float32" in found.verdict
    assert "rank 2 called broadcast" in found.verdict


@pytest.mark.parametrize(("other", "what"), [(entry(2, size=(5,)), "shape"), (entry(2, dtype="BFloat16"), "type")])
def test_mismatched_shapes_and_types_are_found_before_their_consequences(other: Entry, what: str) -> None:
    """The hang comes later than the mismatch."""
    found = verdict(dump(0, [entry(1), entry(2), entry(3, done=False)]), dump(1, [entry(1), other], stack=ASLEEP))
    assert (found.kind, found.culprits) == ("mismatch", [0, 1])
    assert f"the {what} of collective #2" in found.verdict


@pytest.mark.parametrize("op", ["all_to_all", "gather", "scatter"])
def test_ranks_may_send_different_amounts_if_the_operation_allows_it(op: str) -> None:
    found = verdict(dump(0, [entry(1, op=op, size=(3,))]), dump(1, [entry(1, op=op, size=(5,))]))
    assert found.kind == "nothing"


def test_different_shapes_with_equally_many_elements_match() -> None:
    assert verdict(dump(0, [entry(1, size=(2, 4))]), dump(1, [entry(1, size=(8,))])).kind == "nothing"


def test_a_rank_without_a_dump_is_named() -> None:
    found = verdict(dump(0, [entry(1), entry(2)], lost=True))
    assert (found.kind, found.culprits) == ("missing", [1])
    assert "rank 1 left no dump in step 3" in found.verdict
    assert found.ranks[1].state == "left no dump"


def test_a_collective_that_all_have_joined_blames_nobody() -> None:
    found = verdict(*(dump(rank, [entry(4, done=False, backend="nccl")]) for rank in (0, 1)))
    assert (found.kind, found.culprits) == ("all joined", [])
    assert "check the network and the devices" in found.verdict


def test_the_stacks_decide_if_nothing_was_recorded() -> None:
    """gloo records neither sends nor receives."""
    found = verdict(dump(0, []), dump(1, [], stack=ASLEEP))
    assert (found.kind, found.culprits) == ("elsewhere", [1])
    assert found.verdict.startswith("rank 1 is outside all collectives in step 3: it is in time.sleep(60) at ")


def test_collectives_that_one_recorder_has_dropped_are_no_mismatch() -> None:
    early, late = [entry(seq) for seq in range(1, 9)], [entry(seq) for seq in range(6, 9)]
    assert verdict(dump(0, early), dump(1, late)).kind == "nothing"


def test_damaged_files_and_earlier_attempts_are_reported_and_ignored(tmp_path: Path) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)], world_size=4))
    write_dump(tmp_path, dump(1, [entry(1)], world_size=4, stack=ASLEEP))
    write_dump(tmp_path, dump(2, [entry(1)], world_size=4, attempt=900.0))
    write_dump(tmp_path, dump(3, [entry(1)], world_size=4))
    torn = tmp_path / "rank-3.json"
    torn.write_bytes(torn.read_bytes()[:-100])
    dumps = read_dumps(tmp_path)
    assert [dump.rank for dump in dumps.dumps] == [0, 1]
    assert dumps.missing == [2, 3]
    assert any("ignored rank-3.json" in note for note in dumps.notes)
    assert any("earlier attempt" in note and "rank 2" in note for note in dumps.notes)
    found = analyse(dumps)
    assert (found.kind, found.culprits) == ("behind", [1, 2, 3])  # it is unknown what holds up rank 1
    assert found.verdict.startswith("rank 1 is behind in step 3: it is in time.sleep(60)")
    assert found.verdict.endswith(
        "; ranks 2-3 left no dump: they were killed or stuck where Python cannot run, or their dumps are not in this folder"
    )


def test_dumps_of_earlier_steps_are_ignored(tmp_path: Path) -> None:
    """Rank 1 dumped on request in step 1 and was killed in step 9 without another dump."""
    write_dump(tmp_path, dump(0, [entry(40)], step=9, lost=True))
    write_dump(tmp_path, dump(1, [entry(3)], step=1, stack=ASLEEP))
    dumps = read_dumps(tmp_path)
    assert any("ignored rank 1's dump of step 1: other dumps are from step 9" in note for note in dumps.notes)
    assert analyse(dumps).kind == "missing"


HEADER = "rank {}, attempt {}, process 7 on node\n"
DEATH = (
    "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00000000000000ff (most recent call first):\n"
    '  File "/home/me/kernels.py", line 5 in launch\n'
)


def test_the_stacks_of_a_process_that_died_in_an_extension_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2)], lost=True))
    left = tmp_path / "rank-1.stacks.txt"
    left.write_text(HEADER.format(1, 900.0) + "of an earlier attempt\n" + HEADER.format(1, 1000.0) + DEATH)
    assert main(["analyse", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rank 1 left no dump in step 3: it was killed or stuck where Python cannot run, or")
    assert f"## Stacks of rank 1 ({left})\n\n```\n{DEATH}```\n" in printed and "earlier" not in printed
    write_dump(tmp_path, dump(0, [entry(1)], attempt=1100.0))
    write_dump(tmp_path, dump(1, [entry(1)], attempt=1100.0))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "Stacks" not in capsys.readouterr().out  # they are of an earlier attempt


def test_a_run_that_left_only_stacks_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of one rank, for example."""
    for rank in range(6):
        (tmp_path / f"rank-{rank}.stacks.txt").write_text(HEADER.format(rank, 1000.0) + DEATH)
    assert main(["analyse", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("/home/me/kernels.py") == 4 and "of ranks 4-5." in printed


def test_a_stacks_file_without_stacks_is_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.stacks.txt").write_text(HEADER.format(0, 1000.0))
    assert main(["analyse", str(tmp_path)]) == 2
    assert "has no crash files, dumps or stacks; a rank leaves files when it fails" in capsys.readouterr().err


def test_the_command_prints_the_verdict_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], stack=ASLEEP))
    assert main(["analyse", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("rank 1 is behind in step 3: it is in time.sleep(60)")
    assert main(["analyse", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["collectives"]
    assert (found["kind"], found["culprits"], found["ranks"][1]["rank"]) == ("behind", [1], 1)
    assert main(["analyse", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [True, False])
def test_ranks_that_wait_for_a_killed_rank_are_not_behind(fails: bool) -> None:
    """Rank 3 is killed; ranks 1 and 2 wait for it, and rank 0 waits for rank 2. With gloo they fail."""
    state: dict[str, Any] = {"lost": True} if fails else {}
    found = verdict(
        of_mesh(0, [entry(1, group="tp01"), entry(4, done=fails, group="dp02")], **state),
        of_mesh(1, [entry(1, group="tp01"), entry(4, done=fails, group="dp13")], **state),
        of_mesh(2, [entry(3, group="dp02"), entry(7, done=fails, group="tp23")], **state),
    )
    assert (found.kind, found.culprits) == ("missing", [3])
    assert not any("behind" in line for line in [found.verdict, *found.details])


def test_a_slow_rank_is_not_blamed_alone_if_another_rank_was_killed() -> None:
    """Rank 1 still computes, and rank 0 waits for it as in any healthy job."""
    found = verdict(
        of_mesh(0, [entry(5, done=False, group="tp01")]),
        of_mesh(1, [entry(4, group="tp01"), entry(4, group="dp13")], stack=ASLEEP),
        of_mesh(2, [entry(7, group="tp23")], lost=True),
    )
    assert (found.kind, found.culprits) == ("missing", [1, 3])
    assert found.verdict.startswith(
        "rank 3 left no dump in step 3: it was killed or stuck where Python cannot run, or its dump is not in this folder; "
        "rank 2 was left"
    )
    assert "; rank 1 is behind: it is in time.sleep(60)" in found.verdict


def test_a_rank_inside_a_collective_that_all_have_joined_is_not_behind_in_another() -> None:
    """The network between ranks 0 and 1 is down; rank 2 waits for rank 0."""
    groups: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 2)}
    stuck = entry(3, done=False, group="a", backend="nccl")
    found = verdict(
        dump(0, [entry(1, group="b", backend="nccl"), stuck], world_size=3, groups=groups, stack=ITEM),
        dump(1, [stuck], world_size=3, groups=groups, stack=ITEM),
        dump(2, [entry(2, done=False, group="b", backend="nccl")], world_size=3, groups=groups, stack=ITEM),
    )
    assert (found.kind, found.culprits) == ("all joined", [])
