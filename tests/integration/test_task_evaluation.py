"""Tasks of lm-eval while a model trains: the scores of ``titan eval``, on any mesh, and the same training to the bit as
without them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.quick import rows
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.toolkit.runs.run_log import RunLog
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe
from titan_testing.meshes import CP, DR, PP, TP

pytestmark = pytest.mark.full  # lm-eval takes seconds to import and to index its tasks
SETTINGS: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 96, max_seq_len = 64}",
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.deterministic": "true",
    "lr_scheduler.warmup_steps": 1,
    "optimizer.lr": 0.01,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "DDP 2": (2, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "CP 2": (2, {CP: 2}),
    "PP 2": (2, {PP: 2}),
    "TP 2 x PP 2": (4, {TP: 2, PP: 2}),
    "CP 2, document mask": (2, {CP: 2, "data.document_mask": "true"}),
}
RUN = Path("outputs/llama3_debug")
Settings = dict[str, object]


@pytest.fixture(scope="module")
def on(lm_eval_tasks: str) -> Settings:
    """Two tasks, every second step."""
    tasks = {"evaluation.tasks": '["titan_choice", "titan_rolling"]', "evaluation.include_path": lm_eval_tasks}
    return {"evaluation.enable": "true", "evaluation.freq": 2, **tasks}


def trained(folder: str, settings: dict[str, object]) -> RunRecord:
    os.chdir(folder)
    return run_recipe("llama3_debug", {**SETTINGS, **settings}, weights=True)


def scores(folder: Path) -> dict[int, dict[str, float]]:
    """Return the scores that the run logged, by step."""
    records = [
        record for record in RunLog.read_metrics(folder / RUN) if any(key.startswith("evaluation/") for key in record)
    ]
    found: dict[int, dict[str, float]] = {}
    for record in records:
        named = {key.removeprefix("evaluation/"): value for key, value in record.items() if key.startswith("evaluation/")}
        found.setdefault(record["step"], {}).update(named)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> RunRecord:
    """The run on one device without tasks."""
    return gloo.run(1, trained, str(tmp_path_factory.mktemp("plain")), {})[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool, on: Settings) -> tuple[Path, RunRecord]:
    """The run on one device with tasks."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, gloo.run(1, trained, str(folder), on)[0]


def test_training_is_the_same_to_the_bit(alone: tuple[Path, RunRecord], plain: RunRecord) -> None:
    assert alone[1].losses == plain.losses
    assert all(tensor.equal(plain.final[name]) for name, tensor in alone[1].final.items())
    assert list(scores(alone[0])) == [0, 2, 4]


def test_scores_are_those_of_titan_eval(
    alone: tuple[Path, RunRecord], lm_eval_tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of ``titan eval`` are those of lm-eval with the exported model: see ``test_eval.py``."""
    folder = alone[0]
    command = ["eval", str(folder / RUN / "checkpoint/step-4"), "--tasks", "titan_choice,titan_rolling"]
    assert main([*command, "--include-path", lm_eval_tasks, "--json", "--job.device", "cpu"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    found = {f"{task}/{name.removesuffix(',none')}": one for task, metrics in tasks.items() for name, one in metrics.items()}
    wanted = scores(folder)[4]
    assert {"titan_choice/acc", "titan_choice/acc_norm", "titan_rolling/bits_per_byte"} <= wanted.keys()
    assert {name: found[name] for name in wanted if "stderr" not in name} == pytest.approx(
        {name: value for name, value in wanted.items() if "stderr" not in name}, rel=1e-5
    )


@pytest.mark.parametrize("name", rows(MESHES, ["CP 2", "TP 2 x PP 2", "CP 2, document mask"]))
def test_scores_on_a_mesh(gloo: GlooPool, tmp_path: Path, on: Settings, alone: tuple[Path, RunRecord], name: str) -> None:
    ranks, mesh = MESHES[name]
    record = gloo.run(ranks, trained, str(tmp_path), {**on, **mesh})[0]
    if "document" not in name:
        assert record.losses == pytest.approx(alone[1].losses, rel=1e-5)
        found, wanted = scores(tmp_path), scores(alone[0])
        assert found.keys() == wanted.keys()
        for step, values in wanted.items():
            assert found[step] == pytest.approx(values, rel=1e-4)
    tmp_plain = tmp_path / "plain"
    tmp_plain.mkdir()
    assert gloo.run(ranks, trained, str(tmp_plain), mesh)[0].losses == record.losses


def test_a_task_that_fails_ends_nothing(gloo: GlooPool, tmp_path: Path, on: Settings, plain: RunRecord) -> None:
    """One whose data is missing, and one that generates text where layers are divided; the others still run."""
    tasks = '["titan_absent", "titan_generate", "titan_choice"]'
    record = gloo.run(2, trained, str(tmp_path), {**on, PP: 2, "evaluation.tasks": tasks})[0]
    assert record.losses == pytest.approx(plain.losses, rel=1e-5)
    assert {key.partition("/")[0] for key in scores(tmp_path)[4]} == {"titan_choice"}


def test_the_final_tasks_have_all_of_their_questions(
    gloo: GlooPool, tmp_path: Path, on: Settings, alone: tuple[Path, RunRecord]
) -> None:
    more = {"evaluation.limit": 2, "evaluation.final_tasks": '["titan_choice", "titan_generate"]', "evaluation.freq": 0}
    gloo.run(2, trained, str(tmp_path), {**on, **more, TP: 2})
    found = scores(tmp_path)
    assert list(found) == [0, 4] and "titan_generate/exact_match" in found[4]
    assert found[4]["titan_choice/acc"] == pytest.approx(scores(alone[0])[4]["titan_choice/acc"])
    assert found[0]["titan_choice/acc"] in (0, 0.5, 1)


MISTAKES: dict[str, tuple[dict[str, object], str]] = {
    "none": ({"evaluation.tasks": "[]"}, "names no task"),
    "unknown": ({"evaluation.tasks": '["titan_choise"]'}, "is not a task of lm-eval; did you mean 'titan_choice'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(in_tmp: Path, on: Settings, name: str) -> None:
    settings, says = MISTAKES[name]
    with pytest.raises(UserError, match=says):
        trained(str(in_tmp), {**on, **settings})
