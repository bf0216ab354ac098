"""Going back from a spike: without some documents, the curve is that of a run that left them out from its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.quick import rows
from harness.staged import RECIPE, run_staged, write_recipe
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit.runs.run_log import RunLog
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord
from titan_testing.meshes import TP

RUN = Path("outputs/staged")
SETTINGS: dict[str, object] = {"checkpoint.interval": 4, "checkpoint.keep_latest_k": 0, "training.steps": 12}
MESHES: dict[str, tuple[int, dict[str, object]]] = {"one device": (1, {}), "FSDP 2": (2, {}), "TP 2": (2, {TP: 2})}
PLAIN = RECIPE.partition("[[stages]]")[0]


def train(gloo: GlooPool, folder: Path, mesh: str, more: dict[str, object] | None = None) -> RunRecord:
    ranks, degrees = MESHES[mesh]
    return gloo.run(ranks, run_staged, str(folder), {**SETTINGS, **degrees, **(more or {})})[0]


def rewound(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    capsys.readouterr()
    assert main(["run", "rewind", str(RUN), *arguments]) == 0
    return capsys.readouterr().out


def of_other_folder(gloo: GlooPool, folder: Path, mesh: str, excluded: str) -> RunRecord:
    """Train a run that passes over the documents from its first step."""
    folder.mkdir()
    write_recipe(folder, PLAIN)
    (folder / "excluded.jsonl").write_text(excluded)
    return train(gloo, folder, mesh, {"data.exclude": "excluded.jsonl"})


@pytest.mark.parametrize("mesh", rows(MESHES, ["FSDP 2"]))
def test_the_curve_is_that_of_a_run_without_the_documents(
    gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str], mesh: str
) -> None:
    """Those of two steps, and three by name."""
    write_recipe(in_tmp, PLAIN)
    whole = train(gloo, in_tmp, mesh)
    assert main(["data", "step", str(RUN), "11", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["documents"]
    named = sorted({one["place"] for one in listed if one["first_token"] == 0})[:3]
    out = rewound(capsys, "--to", "4", "--without-steps", "7-8", "--without-documents", *named)
    assert (
        "checkpoints and exports set aside: 2" in out
        and len(list((in_tmp / RUN / "checkpoint").glob("aside-1-step-*"))) == 2
    )
    excluded = (in_tmp / RUN / "excluded.jsonl").read_text()
    (event,) = (one for one in RunLog.read_events(in_tmp / RUN) if one["event"] == "rewind")
    assert (event["from"], event["step"], event["documents"]) == (12, 4, len(excluded.splitlines()))
    assert len(excluded.splitlines()) > 8 and all(json.dumps(place) in excluded for place in named)
    again = train(gloo, in_tmp, mesh)
    fresh = of_other_folder(gloo, in_tmp / "fresh", mesh, excluded)
    assert fresh.losses[:4] == pytest.approx(whole.losses[:4], rel=1e-6)
    assert again.losses == pytest.approx(fresh.losses[4:], rel=1e-6)
    assert again.losses[2:] != pytest.approx(whole.losses[6:], rel=1e-6)
    # The provenance of the run agrees: no later step has any of the documents.
    for step in ("7", "9", "11"):
        assert main(["data", "step", str(RUN), step, "--json"]) == 0
        used = {(one["dataset"], one["index"]) for one in json.loads(capsys.readouterr().out)["documents"]}
        assert not used & {(one["dataset"], one["index"]) for one in map(json.loads, excluded.splitlines())}


@pytest.mark.full
def test_a_document_in_use_stays(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that the run has begun by the step is finished, and the command names it."""
    write_recipe(in_tmp, PLAIN)
    for name in ("web", "code"):
        lines = [json.dumps({"text": f"{index} " * 150}) for index in range(40)]
        (in_tmp / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    whole = train(gloo, in_tmp, "one device")
    (in_tmp / RUN / "excluded.jsonl").write_text(
        "".join(json.dumps({"dataset": one["dataset"], "index": one["index"]}) + "\n" for one in documents(capsys, 4))
    )
    capsys.readouterr()
    assert main(["run", "rewind", str(RUN), "--to", "4"]) == 0
    again = train(gloo, in_tmp, "one device")
    assert again.losses[0] == whole.losses[4]
    assert main(["run", "rewind", str(RUN), "--to", "4", "--without-steps", "5"]) == 2
    assert "earlier steps than 5 have begun all of" in capsys.readouterr().err


def documents(capsys: pytest.CaptureFixture[str], step: int) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["data", "step", str(RUN), str(step), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["documents"]
    return found


@pytest.mark.full
def test_a_rewind_without_exclusions_repeats_the_steps(
    gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(in_tmp)
    whole = train(gloo, in_tmp, "one device")
    rewound(capsys, "--to", "4")
    assert train(gloo, in_tmp, "one device").losses == whole.losses[4:]
    rewound(capsys, "--to", "8")
    assert train(gloo, in_tmp, "one device").losses == whole.losses[8:]
    kept = sorted(path.name for path in (in_tmp / RUN / "checkpoint").iterdir() if path.is_dir())
    assert kept == ["aside-1-step-12", "aside-1-step-8", "aside-2-step-12", "step-12", "step-4", "step-8"]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "not saved": (["--to", "5"], "no checkpoint of this step; the newest before is of step 4"),
    "before": (["--to", "8", "--without-steps", "7-9"], "is not after step 8, to which the run goes back"),
    "range": (["--to", "4", "--without-steps", "9-7"], "must be a range"),
    "words": (["--to", "4", "--without-steps", "soon"], "is no range of steps"),
    "nothing there": (["--to", "4", "--without-documents", "web.jsonl:999"], "no dataset of the run has a document there"),
}


def test_mistakes_are_one_clear_error_and_change_nothing(
    gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(in_tmp, PLAIN)
    train(gloo, in_tmp, "one device")
    before = sorted(str(path) for path in (in_tmp / RUN).rglob("*"))
    for arguments, says in MISTAKES.values():
        capsys.readouterr()
        assert main(["run", "rewind", str(RUN), *arguments]) == 2
        errors = capsys.readouterr().err
        assert says in errors and errors.count("titan: error") == 1, errors
    assert main(["data", "step", str(RUN), "3", "--json"]) == 0
    used = json.loads(capsys.readouterr().out)["documents"][0]["place"]
    assert main(["run", "rewind", str(RUN), "--to", "4", "--without-documents", used]) == 2
    assert "before the run goes back to" in capsys.readouterr().err
    assert main(["run", "rewind", "nowhere", "--to", "4"]) == 2
    assert sorted(str(path) for path in (in_tmp / RUN).rglob("*")) == before


@pytest.mark.full
def test_an_exclusion_that_is_forgotten_is_refused(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(in_tmp, PLAIN)
    train(gloo, in_tmp, "one device", {"training.stop_at_step": 8})
    rewound(capsys, "--to", "4", "--without-steps", "7")
    train(gloo, in_tmp, "one device", {"training.stop_at_step": 8})
    (in_tmp / RUN / "excluded.jsonl").unlink()
    with pytest.raises(RuntimeError, match="documents were passed over, and are not any more"):
        train(gloo, in_tmp, "one device")


STRANGE = "".join(chr(128 + 37 * index % 1800) for index in range(400))
"""A text unlike all others."""
SPIKES: dict[str, object] = {
    "numerics.spike_action": "rewind",
    "numerics.spike_window": 8,
    "numerics.spike_sigma": 8.0,
    "checkpoint.interval": 10,
    "checkpoint.keep_latest_k": 0,
    "training.steps": 38,
    "optimizer.lr": 0.01,
}


def write_spike(folder: Path) -> None:
    """Write data with a few documents unlike all others."""
    write_recipe(folder, PLAIN)
    for name in ("web", "code"):
        lines = [json.dumps({"text": f"abc {index % 7} " * (3 + index % 5)}) for index in range(700)]
        for number in range(100, 700, 150):
            lines[number] = json.dumps({"text": f"{name} {number} {STRANGE}"})
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("mesh", rows(MESHES, []))
def test_a_job_goes_back_from_a_spike(gloo: GlooPool, in_tmp: Path, mesh: str) -> None:
    """In the same processes. From there on it is a run that passed over the documents from its first step."""
    write_spike(in_tmp)
    record = train(gloo, in_tmp, mesh, SPIKES)
    rewinds = [event for event in RunLog.read_events(in_tmp / RUN) if event["event"] == "rewind"]
    assert rewinds and record.reason == "all steps are done"
    excluded = (in_tmp / RUN / "excluded.jsonl").read_text()
    assert sum(event["documents"] for event in rewinds) == len(excluded.splitlines())
    other = in_tmp / "fresh"
    other.mkdir()
    write_spike(other)
    (other / "excluded.jsonl").write_text(excluded)
    ranks, degrees = MESHES[mesh]
    more = {**SPIKES, **degrees, "data.exclude": "excluded.jsonl", "numerics.spike_action": "warn"}
    fresh = gloo.run(ranks, run_staged, str(other), more)[0]
    last = rewinds[-1]["step"]
    assert record.losses[-(38 - last) :] == pytest.approx(fresh.losses[last:], rel=1e-6)


@pytest.mark.full
def test_a_branch_passes_over_the_same_documents(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(in_tmp, PLAIN)
    train(gloo, in_tmp, "one device", {"training.stop_at_step": 8})
    rewound(capsys, "--to", "4", "--without-steps", "7")
    whole = train(gloo, in_tmp, "one device")
    assert main(["run", "branch", str(RUN), "--at", "8", "--to", "outputs/branch"]) == 0
    (in_tmp / "staged.toml").write_text((in_tmp / "outputs/branch/config.toml").read_text())
    assert gloo.run(1, run_staged, str(in_tmp), {})[0].losses == whole.losses[4:]


@pytest.mark.full
def test_a_start_again_continues_from_the_newest_checkpoint(gloo: GlooPool, in_tmp: Path) -> None:
    """Not from ``checkpoint.load_step``, from which the job was started."""
    write_spike(in_tmp)
    train(gloo, in_tmp, "one device", {**SPIKES, "training.stop_at_step": 20})
    record = train(gloo, in_tmp, "one device", {**SPIKES, "checkpoint.load_step": 10})
    assert record.reason == "all steps are done"
    starts = [event["step"] for event in RunLog.read_events(in_tmp / RUN) if event["event"] == "start"]
    assert starts[:3] == [0, 10, 30]


@pytest.mark.full
def test_after_so_many_spikes_the_run_stops(gloo: GlooPool, in_tmp: Path) -> None:
    write_spike(in_tmp)
    with pytest.raises(RuntimeError, match="has gone back 1 times already"):
        train(gloo, in_tmp, "one device", {**SPIKES, "numerics.spike_rewinds": 1, "training.steps": 60})


def test_rewinding_without_checkpoints_is_refused(in_tmp: Path) -> None:
    write_spike(in_tmp)
    with pytest.raises(UserError, match="goes back to a checkpoint, and this job saves none"):
        run_staged(str(in_tmp), {**SPIKES, "checkpoint.enable": "false"})
