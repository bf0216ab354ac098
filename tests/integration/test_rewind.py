"""Going back from a spike: without some documents, the curve is that of a run that left them out from its first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord
from harness.meshes import TP
from harness.quick import rows
from harness.staged import RECIPE, run_staged, write_recipe
from titan_core.cli.main import main

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
    assert "checkpoints set aside: 2" in out and len(list((in_tmp / RUN / "checkpoint").glob("aside-1-step-*"))) == 2
    excluded = (in_tmp / RUN / "excluded.jsonl").read_text()
    assert len(excluded.splitlines()) > 8 and all(json.dumps(place) in excluded for place in named)
    again = train(gloo, in_tmp, mesh)
    fresh = of_other_folder(gloo, in_tmp / "fresh", mesh, excluded)
    assert fresh.losses[:4] == pytest.approx(whole.losses[:4], rel=1e-6)
    assert again.losses == pytest.approx(fresh.losses[4:], rel=1e-6)
    assert again.losses[2:] != pytest.approx(whole.losses[6:], rel=1e-6)
    # The books of the run agree: no later step has any of the documents.
    for step in ("7", "9", "11"):
        assert main(["data", "step", str(RUN), step, "--json"]) == 0
        used = {(one["dataset"], one["index"]) for one in json.loads(capsys.readouterr().out)["documents"]}
        assert not used & {(one["dataset"], one["index"]) for one in map(json.loads, excluded.splitlines())}


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


def test_an_exclusion_that_is_forgotten_is_refused(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(in_tmp, PLAIN)
    train(gloo, in_tmp, "one device", {"training.stop_at_step": 8})
    rewound(capsys, "--to", "4", "--without-steps", "7")
    train(gloo, in_tmp, "one device", {"training.stop_at_step": 8})
    (in_tmp / RUN / "excluded.jsonl").unlink()
    with pytest.raises(RuntimeError, match="documents were passed over, and are not any more"):
        train(gloo, in_tmp, "one device")
