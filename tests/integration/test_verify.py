"""``titan verify`` accepts equal meshes, and detects a plugin that changes results."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.distributions import write_distribution
from titan_core.cli.main import main
from titan_debug.cli.verify import tolerance_of
from titan_debug.numerics.statistics import read_statistics
from titan_testing.jobs import make_job

TINY = [
    "--model.args", "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 64}",
    "--training.seq_len", "32", "--training.local_batch_size", "4", "--training.global_batch_size", "4",
    "--checkpoint.enable", "true",
]  # fmt: skip


WRONG = """
from titan_core.api import Observer, Ref, hookimpl

api = (1, 0)

class Wrong:
    @hookimpl
    def titan_train_start(self, run):
        self.step = 0
        if run.world.size > 1:
            for part in run.parts:
                part.module.get_submodule("layers.1.feed_forward").register_forward_hook(self.change)
    @hookimpl
    def titan_step_start(self, step):
        self.step = step
    def change(self, module, inputs, output):
        return output * 1.05 if self.step > 1 else output

@hookimpl
def titan_debuggers():
    return [Observer(name="wrong", summary="", active=lambda context: True, build=Ref("wrong_plugin:build"))]

def build(context):
    return Wrong()
"""


LOSSY = """
from typing import ClassVar
from titan_core.api import MeshDim, MeshUse, Phase, Ranks, Ref, Section, StepUse, Transform, hookimpl

api = (1, 0)

class Racks(Section):
    section: ClassVar[str] = "racks"
    count: Ranks = 1

@hookimpl
def titan_parallelisms():
    rack = MeshDim("rack", "racks.count", divides="batch", data_parallel="own", before="pp")
    return [
        Transform(
            name="racks", summary="", config=Racks, phase=Phase.DATA, steps=StepUse(observer=Ref("lossy:Sum")),
            mesh=MeshUse(dims=(rack,), sums=("rack",), tolerance=0.05),
            active=lambda context: context.job.mesh.degree("rack") > 1,
        )
    ]

class Sum:
    def __init__(self, parts, context):
        self.group = context.mesh["rack"].get_group()
        self.parameters = [parameter for part in parts for _, parameter in part.named_parameters()]
    @hookimpl
    def titan_gradients_complete(self, step):
        import torch.distributed as dist
        for parameter in self.parameters:
            gradient = parameter.grad.to_local()
            scale = gradient.abs().max() / 127
            gradient.div_(scale).round_().mul_(scale)
            dist.all_reduce(gradient, group=self.group)
"""


@pytest.mark.full
def test_a_lossy_sum_passes_and_is_printed(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_tmp / "lossy.py").write_text(LOSSY)
    arguments = ["--plugin", "lossy.py", "verify", "--mesh", "1", "--mesh", "rack=2", "--steps", "2", *TINY]
    assert main(arguments) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "rack=2: transform 'racks' is lossy: its gradients may differ by 5 % (MeshUse.tolerance)" in printed


@pytest.mark.full
def test_a_correct_mesh_passes(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--mesh", "tp=2", "--steps", "2", "--json", *TINY]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["reference"] == "one device" and printed["steps"] == 2
    assert printed["meshes"]["tp=2"]["equal"] and printed["meshes"]["tp=2"]["loss_difference"] < 1e-5
    assert printed["meshes"]["tp=2"]["gradient_difference"] < 1e-4 and printed["meshes"]["tp=2"]["gradient"]
    folder = in_tmp / "outputs/verify/llama3_debug"
    assert not list(folder.glob("*/checkpoint"))
    # The statistics are the same on both meshes, whichever rank holds an element.
    one, two = (read_statistics(folder / name / "debug/statistics")[1] for name in ("one_device", "tp=2"))
    assert list(one.outputs) == list(two.outputs) and {"layers.1.attention.wq", "output", "norm"} <= set(one.outputs)
    for ours, theirs in ((one.outputs, two.outputs), (one.gradients, two.gradients)):
        for name, moments in ours.items():
            assert theirs[name].rms == pytest.approx(moments.rms, rel=1e-4), name
            assert theirs[name].abs_max == pytest.approx(moments.abs_max, rel=1e-4), name
    assert main(["statistics", str(folder / "tp=2")]) == 0
    assert "gradient of  layers.0.attention.wq.weight" in capsys.readouterr().out
    assert main(["statistics", str(folder / "tp=2"), "--step", "7"]) == 2
    assert "the run has no statistics of this step; pass a step with statistics: 1-2" in capsys.readouterr().err


@pytest.mark.full
def test_a_wrong_mesh_is_reported_with_step_and_module(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(in_tmp / "site", "wrong-plugin", WRONG)
    monkeypatch.setenv("PYTHONPATH", str(in_tmp / "site"), prepend=os.pathsep)
    assert main(["verify", "--mesh", "1", "--mesh", "dp_shard=2", "--steps", "3", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "differs at step 2" in printed
    assert "dp_shard=2 first differs from one device at step 2 in the output of layers.1.feed_forward: rms" in printed
    assert "(difference 5.0e-02, allowed 1.0e-03)" in printed


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-4),
        ({"training.mixed_precision_param": "bfloat16"}, 2e-2),
        ({"mx.enable": "true", "mx.recipe_name": "nvfp4", "mx.emulate": "true"}, 2e-2),
        ({"float8.enable": "true", "float8.emulate": "true"}, 2e-2),
    ],
)
def test_the_tolerance_is_that_of_the_number_formats(settings: dict[str, object], tolerance: float) -> None:
    assert tolerance_of(make_job("llama3_debug", settings)) == tolerance


def test_an_impossible_mesh_is_reported_before_anything_is_trained(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--mesh", "tp=3", *TINY]) == 2
    printed = capsys.readouterr()
    assert "titan: error: on tp=3: " in printed.err and "steps, in" not in printed.out
