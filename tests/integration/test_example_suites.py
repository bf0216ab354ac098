"""The examples, installed like packages of third parties, pass the suites that third parties inherit: they train on every
mesh as on one device, without changes to Titan."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ci.house import lines_of_code
from ci.workspace import ROOT
from titan_core.cli.main import main
from titan_testing.meshes import DR, EP, PP, TP, Case
from titan_testing.pytest_plugin import RunJob
from titan_testing.settings import RECIPE
from titan_testing.suites import ModelSuite, ObjectiveSuite, OptimizerSuite, PrecisionSuite, TransformSuite

FOUR_BLOCKS = "{dim = 32, n_layers = 4, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}"


class Example:
    """An example, installed from its wheel."""

    package: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _installed(self, site_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(site_of(self.package))


@pytest.mark.full
class TestTinyGPT(Example, ModelSuite):
    package, model = "titan-model-tinygpt", "tinygpt"
    args: ClassVar = {"dropout": 0.1}


@pytest.mark.full
class TestGPT2(Example, ModelSuite):
    package, model = "titan-model-gpt2", "gpt2"
    args: ClassVar = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 288, "max_seq_len": 64}


@pytest.mark.full
class TestHybrid(Example, ModelSuite):
    package, model = "titan-model-hybrid", "hybrid"
    args: ClassVar = {"dim": 32, "recurrent_dim": 48, "n_layers": 4, "n_heads": 2, "divide_sequences": True}

    @pytest.mark.parametrize("mesh", ["TP 2", "CP 2"])
    def test_documents_on(self, mesh: str, run_job: RunJob) -> None:
        self.require_equal_on(super().rows("test_mesh")[mesh], run_job, {"data.document_mask": "true"})


@pytest.mark.quick_rows(1)
class TestLoRA(Example, PrecisionSuite):
    """Of four blocks, so that a pipeline's ranks may have two stages. ``test_lora_example.py`` has its gradients."""

    package = "titan-lora"
    settings: ClassVar = {"model.args": FOUR_BLOCKS}
    switched_on: ClassVar = {"lora.rank": 4, "training.freeze": '["*"]'}
    meshes = (
        "DDP 2", "FSDP 2", "HSDP 2x2", "TP 2", "TP 2, no SP", "PP 2, 1F1B", "PP 2, ZBVZeroBubble", "CP 2", "FSDP x TP",
        "FSDP x PP", "TP x CP", "TP x PP",
    )  # fmt: skip
    loss = gradient = 1e-5


@pytest.mark.full
class TestInt8QAT(Example, PrecisionSuite):
    """The last bit of a scale decides how a weight midway between two grid points is rounded."""

    package = "titan-int8-qat"
    settings: ClassVar = {"activation_checkpoint.mode": "selective"}
    switched_on: ClassVar = {"int8_qat.enable": "true", "int8_qat.bits": 4}
    meshes = ("FSDP 2", "TP 2", "PP 2, 1F1B", "CP 2", "FSDP x TP")


@pytest.mark.quick_rows(1)
class TestZones(Example, TransformSuite):
    package = "titan-zones"
    switched_on: ClassVar = {"zones.count": 2}
    needs = ("titan-parallel",)
    meshes = ("FSDP 2", "DDP 2", "TP 2", "PP 2, 1F1B", "CP 2")


@pytest.mark.full
class TestGatheredMuon(Example, OptimizerSuite):
    package, optimizer = "titan-optim-muon", "GatheredMuon"
    settings: ClassVar = {"gathered_muon.dtype": "float32"}
    loss = 5e-5

    @pytest.mark.parametrize("nesterov", ["true", "false"])
    @pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
    def test_updates_are_those_of_titan_optim(self, nesterov: str, scale: str, run_job: RunJob) -> None:
        """Which are those of torch's Muon and AdamW (``tests/optim/test_muon.py``)."""
        keys = {"dtype": "float32", "nesterov": nesterov, "scale": scale, "momentum": 0.9}
        found, expected = (
            run_job(RECIPE, {**self.job(), "optimizer.name": name, **{f"{section}.{key}": keys[key] for key in keys}})
            for name, section in (("GatheredMuon", "gathered_muon"), ("Muon", "muon"))
        )
        self.require_equal_records(found, expected)


DIVIDED = {
    "FSDP 2": (2, {}), "EP 2": (2, {EP: 2}), "EP x FSDP": (4, {EP: 2}), "EP x HSDP": (4, {EP: 2, DR: 2}),
    "EP x TP": (4, {EP: 2, TP: 2}), "EP x PP": (4, {EP: 2, PP: 2}),
}  # fmt: skip


@pytest.mark.full
class TestMuonOfExperts(Example, OptimizerSuite):
    package, recipe, optimizer = "titan-model-moe", "moe", "Muon"
    settings: ClassVar = {"model.args": "{dim = 32, expert_dim = 24}", "muon.dtype": "float32"}
    loss = 5e-5
    weights = 1e-6

    def rows(self, test: str) -> Mapping[str, Any]:
        return {name: Case(name, ranks, overrides) for name, (ranks, overrides) in DIVIDED.items()}


VALIDATED: dict[str, object] = {
    "validation.enable": "true", "validation.dataset": "stdlib", "validation.steps": 1, "validation.freq": 3,
}  # fmt: skip


@pytest.mark.quick_rows(1)
class TestZLoss(Example, ObjectiveSuite):
    package, objective = "titan-objective-z-loss", "next_token_z_loss"
    settings: ClassVar = {"z_loss.coefficient": 0.05, **VALIDATED}
    meshes = (*ObjectiveSuite.meshes, "FSDP x TP")

    def test_the_penalty_is_part_of_the_loss(self, run_job: RunJob) -> None:
        one, plain = (run_job(RECIPE, {**self.job(), **more}) for more in ({}, {"z_loss.coefficient": 0.0}))
        assert one.losses[0] - plain.losses[0] == pytest.approx(0.05 * one.metrics[0]["normaliser"], rel=1e-5)
        assert one.losses[0] > 1.1 * plain.losses[0] and one.validation[3][0] > 1.1 * plain.validation[3][0]


@pytest.mark.full
class TestDistillation(Example, ObjectiveSuite):
    """From a teacher of another size."""

    package, objective = "titan-distillation", "distillation"
    settings: ClassVar = VALIDATED
    teacher: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _taught(self, _installed: None, run_job: RunJob, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls = type(self)
        if not cls.teacher:
            saved = {"checkpoint.enable": "true", "job.dump_folder": str(tmp_path_factory.mktemp("teacher"))}
            run_job(
                RECIPE,
                {**super().job(), "objective.name": "next_token", "model.args": FOUR_BLOCKS, "training.seed": 7, **saved},
            )
            cls.teacher = saved["job.dump_folder"]

    def job(self) -> dict[str, object]:
        return {**super().job(), "distillation.teacher": self.teacher}

    def test_the_student_comes_closer(self, run_job: RunJob) -> None:
        one = run_job(RECIPE, self.job())
        divergences = [step["divergence"] for step in one.metrics]
        assert divergences[0] > 1e-3 and divergences[2] < divergences[0]
        for loss, step in zip(one.losses, one.metrics, strict=True):
            assert loss == pytest.approx(0.5 * 4.0 * step["divergence"] + 0.5 * step["cross_entropy"], rel=1e-6)


@pytest.mark.full
class TestDPO(Example, ObjectiveSuite):
    """On prompts with a chosen and a rejected answer."""

    package, objective = "titan-dpo", "dpo"
    settings: ClassVar = {
        **VALIDATED, "dpo.beta": 0.2, "training.seq_len": 64, "data.document_mask": "true", "optimizer.lr": 1e-3,
        "training.dataset": "preferences", "validation.dataset": "preferences",
    }  # fmt: skip
    pairs: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _paired(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        rejected = (" I would rather not say it", " no idea", " no idea")
        lines = [{"prompt": f"{n} + {n}?", "chosen": f" {2 * n}", "rejected": rejected[n % 3]} for n in range(24)]
        path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        type(self).pairs = str(path)

    def job(self) -> dict[str, object]:
        return {**super().job(), "training.dataset_path": self.pairs, "validation.dataset_path": self.pairs}

    def test_a_policy_begins_at_its_reference_and_learns_to_prefer(self, run_job: RunJob) -> None:
        one = run_job(RECIPE, self.job())
        assert one.losses[0] == pytest.approx(math.log(2.0), rel=1e-6)
        assert one.metrics[0] == {"margin": 0.0, "accuracy": 0.0}
        assert one.losses[2] < 0.9 * one.losses[0]
        assert 0.05 < one.metrics[2]["margin"] < 2.0 and one.metrics[2]["accuracy"] > 0.7
        assert one.validation_metrics[3]["accuracy"] > 0.7

    def test_a_resumed_run_has_the_same_reference(self, run_job: RunJob, tmp_path: Path) -> None:
        """The reference is the model that the run started from, and not the one that it resumed. No command tells the losses
        of its documents, which depend on the reference."""
        saved = {**self.job(), "checkpoint.enable": "true", "checkpoint.interval": 2, "job.dump_folder": str(tmp_path)}
        run_job(RECIPE, {**saved, "training.stop_at_step": 2})
        resumed, whole = run_job(RECIPE, saved), run_job(RECIPE, self.job())
        assert resumed.losses == whole.losses[2:] and resumed.metrics == whole.metrics[2:]
        with redirect_stderr(io.StringIO()) as errors:
            assert main(["data", "step", str(tmp_path), "3", "--loss"]) == 2
        assert 'objective.name = "dpo": compares with a reference model' in errors.getvalue()
        assert errors.getvalue().endswith("; drop --loss\n")


GALLERY = {
    re.findall(r"examples/([\w-]+)\)", line)[0]: line.strip("| ").split(" | ")
    for line in (ROOT / "docs/plugins/gallery.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| [")
}


def test_the_gallery_lists_every_example_with_its_lines() -> None:
    examples = {
        one.name: sum(map(lines_of_code, one.rglob("*.py"))) for one in (ROOT / "examples").iterdir() if one.is_dir()
    }
    assert {name: int(cells[3]) for name, cells in GALLERY.items()} == examples


@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery_names_the_meshes_of_an_examples_suite(name: str) -> None:
    meshes, test = GALLERY[name][5], GALLERY[name][6].strip(" |`")
    if test.endswith(".py"):
        assert (ROOT / test).is_file()
        return
    suite = globals()[test]
    tried = " ".join([*suite().rows("test_mesh"), *suite().rows("test_composed")])
    kinds = [kind for kind in ("DDP", "FSDP", "HSDP", "TP", "PP", "CP", "EP") if re.search(rf"\b{kind}\b", tried)]
    assert (meshes, suite.package) == (", ".join(kinds), name)
