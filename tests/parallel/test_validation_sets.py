"""Several validation datasets: each has the loss that it has alone, and together they have the mean over all targets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.quick import rows
from titan_core.api import UserError
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job
from titan_testing.meshes import CP, FAST, PP, TP, run_in

LETTERS = {"short": "7/5/11/4/9/6/8/12/3/5", "long": "30/41/17/23/38/29/33/36/27"}
SETS = ", ".join(f'{{name = "{name}", dataset = "letters", dataset_path = "{path}"}}' for name, path in LETTERS.items())
SETTINGS: dict[str, object] = {
    **FAST, "training.steps": 2, "training.dataset": "letters", "training.dataset_path": "20/30/40/25/31/22/37/28/35/24/26",
    "validation.enable": "true", "validation.freq": 1,
}  # fmt: skip
SEVERAL = {**SETTINGS, "validation.sets": f"[{SETS}]"}
MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "TP 2": (2, {TP: 2}),
    "PP 2": (2, {PP: 2}),
    "CP 2": (2, {CP: 2}),
}


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Path]:
    folder = tmp_path_factory.mktemp("one")
    return gloo.run(1, run_in, str(folder), SEVERAL, False)[0], folder


def test_each_set_has_the_loss_that_it_has_alone(gloo: GlooPool, one_device: tuple[RunRecord, Path], tmp_path: Path) -> None:
    record, folder = one_device
    total, targets = {1: 0.0, 2: 0.0}, 0
    for name, path in LETTERS.items():
        alone = {**SETTINGS, "validation.dataset": "letters", "validation.dataset_path": path, "job.dump_folder": name}
        (single,) = gloo.run(1, run_in, str(tmp_path), alone, False)
        assert single.losses == record.losses
        for step, (loss, count) in single.validation.items():
            assert record.named_validation[step, name] == loss
            total[step] += loss * count
        targets += count
    assert record.validation == {step: (pytest.approx(sum_ / targets, rel=1e-6), targets) for step, sum_ in total.items()}
    lines = [json.loads(line) for line in (folder / "outputs/tiny/metrics.jsonl").read_text().splitlines()]
    of_step = [next(key for key in line if "loss" in key) for line in lines if line["step"] == 1]
    assert of_step == ["loss", "validation_loss", "validation_loss/short", "validation_loss/long"]


@pytest.mark.parametrize("name", rows(MESHES, quick=("PP 2",)))
def test_a_mesh_measures_the_same(gloo: GlooPool, one_device: tuple[RunRecord, Path], tmp_path: Path, name: str) -> None:
    (one, _), (ranks, mesh) = one_device, MESHES[name]
    for record in gloo.run(ranks, run_in, str(tmp_path), {**SEVERAL, **mesh}, False):
        assert record.named_validation == pytest.approx(one.named_validation, rel=1e-6)
        assert record.validation[2][0] == pytest.approx(one.validation[2][0], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"validation.dataset": "letters"}, 'validation.dataset = "letters": conflicts with validation.sets'),
        ({"validation.sets": f"[{SETS}, {SETS}]"}, "validation.sets"),
        ({"validation.sets": '[{name = "a", dataset = "nothing"}]'}, 'validation.sets[0].dataset = "nothing"'),
        ({"validation.sets": '[{name = "a/b", dataset = "letters"}]'}, "validation.sets[0].name"),
        ({"validation.sets": "[]"}, "validation.sets"),
    ],
    ids=["also the short form", "a name twice", "an unknown dataset", "a name with a slash", "none"],
)
def test_a_mistake_names_its_set(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job("tiny", {**SEVERAL, **settings})
    assert says in str(caught.value)
