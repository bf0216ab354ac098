"""The verdict over dumps: which rank is late, which ranks disagree, and which rank is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.made_dumps import ASLEEP, ITEM, TORCH, WITH_BACKGROUND, dump, entry, of_mesh, verdict
from titan_core.cli.main import main
from titan_debug.flight.diagnose import analyse
from titan_debug.flight.dump import BACKGROUND, Dump, Entry, Frame, read_dumps, write_dump

IN_RECV = [Frame(TORCH, 2500, "recv"), Frame("/home/me/stage.py", 31, "forward", "dist.recv(x, 3)")]
STAGE = Frame("/env/lib/python3.11/site-packages/torch/distributed/pipelining/stage.py", 700, "forward_one_chunk")
CHAIN: dict[str, Sequence[int]] = {"tp": (0, 1), "dp_shard": (1, 2, 3)}
PAIR: dict[str, Sequence[int]] = {"pp": (0, 1)}
THREE: dict[str, Sequence[int]] = {"pp": (0, 2), "dp": (2, 1)}
STUCK = entry(3, done=False, group="a", backend="nccl")
OVERLAPPING: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 2)}
BOTH: dict[str, Sequence[int]] = {"a": (0, 1), "b": (0, 1)}
RARE: dict[str, Sequence[int]] = {"rare": (0, 1)}


def p2p(op: str, done: bool, group: str = "pp") -> Entry:
    return replace(entry(1, done, op, group, backend="nccl"), p2p=True)


RECEIVES = p2p("recv 1<-0", done=False)


def sleeper(backend: str) -> tuple[Dump, ...]:
    waits = dump(0, [entry(1, backend=backend), entry(2, done=False, backend=backend)])
    return waits, dump(1, [entry(1, backend=backend)], stack=ASLEEP)


def killed(fails: bool) -> tuple[Dump, ...]:
    """Rank 3 is killed; ranks 1 and 2 wait for it, and rank 0 waits for rank 2. With gloo they fail."""
    state: dict[str, Any] = {"lost": True} if fails else {}
    return (
        of_mesh(0, [entry(1, group="tp01"), entry(4, done=fails, group="dp02")], **state),
        of_mesh(1, [entry(1, group="tp01"), entry(4, done=fails, group="dp13")], **state),
        of_mesh(2, [entry(3, group="dp02"), entry(7, done=fails, group="tp23")], **state),
    )


def batch(done: bool) -> tuple[Dump, ...]:
    sent = [p2p("send 0->1", done=False), p2p("recv 0<-1", done=False), p2p("coalesced", done)]
    return dump(0, sent, groups=PAIR, stack=ITEM), dump(1, [], groups=PAIR, stack=ASLEEP)


def in_background(rank: int, entries: list[Entry], **more: Any) -> Dump:
    return dump(rank, entries, groups=WITH_BACKGROUND, **more)


WAITS_IN_BACKGROUND = entry(1, done=False, group=BACKGROUND)
SLEEPS = (
    "rank 1 is behind in step 3: it is in time.sleep(60) at /home/me/hooks.py:12 in titan_step_start; "
    "rank 0 has waited 1898.0 s for it in all_reduce #2 on all ranks"
)
CASES: dict[str, tuple[tuple[Dump, ...], str, list[int], tuple[str, ...]]] = {
    "a rank sleeps, gloo": (
        sleeper("gloo"), "behind", [1], (f"verdict: {SLEEPS}", "all_reduce of [4] float32 at /home/me/train.py:7 in step")
    ),
    "a rank sleeps, nccl": (sleeper("nccl"), "behind", [1], (f"verdict: {SLEEPS}",)),
    "several pending collectives: it waits in the first": (
        (dump(0, [entry(2, done=False), entry(3, done=False)]), dump(1, [entry(1)], stack=ASLEEP)),
        "behind", [1], ("rank 0 has waited 1898.0 s for it in all_reduce #2 on all ranks",),
    ),
    "the end of a chain: 0 waits for 1 in one group, 1 and 3 for 2 in another, and 2 sleeps": (
        (
            dump(0, [entry(5, done=False, group="tp")], world_size=4, groups=CHAIN),
            dump(1, [entry(4, group="tp"), entry(9, done=False, group="dp_shard")], world_size=4, groups=CHAIN),
            dump(2, [entry(8, group="dp_shard")], world_size=4, groups=CHAIN, stack=ASLEEP),
            dump(3, [entry(9, done=False, group="dp_shard")], world_size=4, groups=CHAIN),
        ),
        "behind", [2],
        (
            "ranks 1, 3 have waited 1891.0 s for it in all_reduce #9 on dp_shard (ranks 1-3)",
            "rank 0: waits for rank 1 in all_reduce #5 on tp (ranks 0-1)",
        ),
    ),
    "groups entered in different orders": (
        (dump(0, [entry(1, done=False, group="a")], groups=BOTH), dump(1, [entry(1, done=False, group="b")], groups=BOTH)),
        "circle", [0, 1],
        (
            "verdict: ranks 0-1 are deadlocked in step 3: rank 0 waits for rank 1 in",
            "#1 on a (ranks 0-1)", "#1 on b (ranks 0-1)",
        ),
    ),
    "another operation than the majority's": (
        (
            *(dump(rank, [entry(1), entry(2, done=False)], world_size=4) for rank in (0, 1, 3)),
            dump(2, [entry(1), entry(2, done=False, op="broadcast")], world_size=4),
        ),
        "mismatch", [2],
        (
            "the operation of collective #2 on all ranks in step 3", "ranks 0-1, 3 called all_reduce of [4] float32",
            "rank 2 called broadcast",
        ),
    ),
    **{
        f"another {what}, before the hang that follows": (
            (dump(0, [entry(1), entry(2), entry(3, done=False)]), dump(1, [entry(1), other], stack=ASLEEP)),
            "mismatch", [0, 1], (f"the {what} of collective #2",),
        )
        for what, other in (("shape", entry(2, size=(5,))), ("type", entry(2, dtype="BFloat16")))
    },
    **{
        f"{op} may send different amounts": (
            (dump(0, [entry(1, op=op, size=(3,))]), dump(1, [entry(1, op=op, size=(5,))])), "nothing", [], ()
        )
        for op in ("all_to_all", "gather", "scatter")
    },
    "different shapes of equally many elements": (
        (dump(0, [entry(1, size=(2, 4))]), dump(1, [entry(1, size=(8,))])), "nothing", [], ()
    ),
    "a rank without a dump": (
        (dump(0, [entry(1), entry(2)], lost=True),),
        "missing", [1], ("rank 1 left no dump in step 3", "rank 1: left no dump"),
    ),
    "all have joined": (
        tuple(dump(rank, [entry(4, done=False, backend="nccl")]) for rank in (0, 1)),
        "all joined", [], ("check the network and the devices",),
    ),
    "nothing was recorded, as gloo's sends and receives: the stacks decide": (
        (dump(0, []), dump(1, [], stack=ASLEEP)),
        "elsewhere", [1], ("verdict: rank 1 is outside all collectives in step 3: it is in time.sleep(60) at ",),
    ),
    "collectives that one recorder has dropped": (
        (dump(0, [entry(seq) for seq in range(1, 9)]), dump(1, [entry(seq) for seq in range(6, 9)])), "nothing", [], ()
    ),
    "a rank is killed, and the others fail": (killed(True), "missing", [3], ()),
    "a rank is killed, and the others wait": (killed(False), "missing", [3], ()),
    "a slow rank while another is killed: 0 waits for 1 as in any healthy job": (
        (
            of_mesh(0, [entry(5, done=False, group="tp01")]),
            of_mesh(1, [entry(4, group="tp01"), entry(4, group="dp13")], stack=ASLEEP),
            of_mesh(2, [entry(7, group="tp23")], lost=True),
        ),
        "missing", [1, 3],
        (
            "verdict: rank 3 left no dump in step 3: it was killed or stuck where Python cannot run, or its dump is not in "
            "this folder; rank 2 was left",
            "; rank 1 is behind: it is in time.sleep(60)",
        ),
    ),
    "the network between 0 and 1 is down, and 2 waits for 0": (
        (
            dump(0, [entry(1, group="b", backend="nccl"), STUCK], world_size=3, groups=OVERLAPPING, stack=ITEM),
            dump(1, [STUCK], world_size=3, groups=OVERLAPPING, stack=ITEM),
            dump(2, [entry(2, done=False, group="b", backend="nccl")], world_size=3, groups=OVERLAPPING, stack=ITEM),
        ),
        "all joined", [], (),
    ),
    "a late rank that thereby lost the others dumped before it failed": (
        (dump(0, [entry(1), entry(2)], lost=True), dump(1, [entry(1)], stack=ASLEEP)), "behind", [1], ()
    ),
    # -- pipelines
    "0 waits for 1, which receives from the sleeping 3, and 2 receives from 0: gloo records no receives": (
        (
            of_mesh(0, [entry(4, done=False, group="tp01")]), of_mesh(1, [entry(3, group="tp01")], stack=IN_RECV),
            of_mesh(2, [], stack=IN_RECV), of_mesh(3, [], stack=ASLEEP),
        ),
        "elsewhere", [3],
        (
            "rank 3 is outside all collectives in step 3: it is in time.sleep(60)",
            "rank 0 waits for rank 1 in all_reduce #4 on tp01 (ranks 0-1)",
        ),
    ),
    "all wait, and some waits are not recorded": (
        (dump(0, [entry(4, done=False)]), dump(1, [entry(3)], stack=IN_RECV)),
        "not recorded", [], ("which rank holds up the others in step 3: rank 0 waits for rank 1 in all_reduce #4",),
    ),
    "sends and receives that nccl records": (
        (
            dump(0, [], world_size=3, groups=THREE, stack=ASLEEP),
            dump(1, [entry(2, done=False, group="dp", backend="nccl")], world_size=3, groups=THREE, stack=ITEM),
            dump(2, [entry(1, group="dp", backend="nccl"), RECEIVES], world_size=3, groups=THREE, stack=ITEM),
        ),
        "behind", [0], ("rank 2 has waited", "for it in recv 1<-0 #1 on pp (ranks 0, 2)"),
    ),
    "a batch whose closing entry is done": (batch(True), "nothing", [], ()),
    "a batch whose closing entry is not": (batch(False), "behind", [1], ()),
    "both sides have started": (
        (
            dump(0, [p2p("send 0->1", done=False)], groups=PAIR, stack=ITEM),
            dump(1, [p2p("recv 1<-0", done=False)], groups=PAIR, stack=ITEM),
        ),
        "all joined", [], (),
    ),
    "code that a pipeline schedule of torch calls does not wait": (
        (dump(0, [entry(1), entry(2, done=False)]), dump(1, [entry(1)], stack=[*ASLEEP, STAGE])), "behind", [1], ()
    ),
    # -- background work
    "a background thread waits for a rank whose main thread waits for the other's": (
        (
            in_background(0, [entry(1), entry(2, done=False)]),
            in_background(1, [entry(1), WAITS_IN_BACKGROUND], stack=ASLEEP),
        ),
        "behind", [1], ("rank 1: ", "waits for rank 0 in all_reduce #1 on background"),
    ),
    "a checkpoint is written in the background": (
        (
            in_background(0, [entry(1), WAITS_IN_BACKGROUND], stack=ASLEEP),
            in_background(1, [entry(1), entry(1, group="0")], stack=ASLEEP),
        ),
        "background", [],
        ("verdict: no rank waits for another in training in step 3; in the background, rank 0 waits for rank 1 in",),
    ),
    "gloo failed while 0 waited in training, and in the background": (
        (
            in_background(0, [WAITS_IN_BACKGROUND, entry(1), entry(2)], lost=True),
            in_background(1, [WAITS_IN_BACKGROUND, entry(1)], stack=ASLEEP),
        ),
        "behind", [1], ("in all_reduce #2 on all ranks",),
    ),
    "1 joined a collective of a rarely used group long ago and has recorded 2000 others since": (
        (
            dump(0, [entry(1, done=False, group="rare"), entry(9)], groups=RARE),
            dump(1, [entry(8), entry(9)], groups=RARE),
        ),
        "not recorded", [], ("rank 0 waits for rank 1 in all_reduce #1 on rare",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_names_who_holds_up_the_others(case: str) -> None:
    dumps, kind, culprits, says = CASES[case]
    found = verdict(*dumps)
    assert (found.kind, found.culprits) == (kind, culprits)
    states = [f"rank {number}: {rank.state}" for number, rank in enumerate(found.ranks)]
    text = "\n".join((f"verdict: {found.verdict}", *found.details, *states))
    assert [part for part in says if part not in text] == []
    assert not case.startswith("a rank is killed") or "behind" not in text


def test_the_label_of_background_groups_is_that_of_titan_core() -> None:
    from titan_core.api.parallel import world

    assert world.BACKGROUND == BACKGROUND


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


def test_dumps_of_one_incident_are_found_although_clocks_differ(tmp_path: Path) -> None:
    """Rank 1 is one step behind, on a machine whose clock is slow."""
    write_dump(tmp_path, dump(0, [entry(1), entry(2, done=False)]))
    write_dump(tmp_path, dump(1, [entry(1)], step=2, stack=ASLEEP, time=1800.0))
    found = analyse(read_dumps(tmp_path))
    assert (found.kind, found.culprits) == ("behind", [1])
    earlier = (tmp_path / "rank-0.json").stat().st_mtime - 300
    os.utime(tmp_path / "rank-1.json", (earlier, earlier))  # it belongs to an earlier incident
    assert analyse(read_dumps(tmp_path)).culprits == [1] and analyse(read_dumps(tmp_path)).kind == "missing"


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
