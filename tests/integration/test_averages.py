"""Averages of weights: equal to those computed by hand on any mesh, resumed, validated, and put into no step of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.fake_cuda import FakeCuda
from harness.quick import rows
from harness.resuming import run_in
from titan_ckpt.format.catalogue import pick
from titan_ckpt.format.chunks import read_whole
from titan_core.api import UserError, hookimpl
from titan_core.cli.main import main
from titan_simulate.engine.result import Owner
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, RunRecord, run_recipe, whole
from titan_testing.meshes import CP, DR, PP, TP

MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP 2": (2, {}),
    "DDP 2": (2, {DR: 2}),
    "TP 2": (2, {TP: 2}),
    "PP 2": (2, {PP: 2}),
    "CP 2": (2, {CP: 2}),
    "TP 2 x PP 2": (4, {TP: 2, PP: 2}),
    "HSDP 2x2": (4, {DR: 2}),
}
DECAY, FIRST, FREQ, STEPS = 0.6, 2, 2, 8
ON: dict[str, object] = {
    "averages.kind": "exponential",
    "averages.decay": DECAY,
    "averages.start_step": FIRST,
    "averages.freq": FREQ,
    "checkpoint.keep_latest_k": 0,
}
HOST: dict[str, object] = {"averages.enable_cpu_offload": "true"}
VALIDATED: dict[str, object] = {
    "validation.enable": "true",
    "validation.freq": 4,
    "validation.steps": 2,
    "validation.dataset": "stdlib",
}


class States:
    """Keeps the whole weights of each step and, at the end, their whole averages."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.averages: dict[str, Tensor] = {}

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._run = run

    @hookimpl
    def titan_step_end(self) -> None:
        named = (pair for part in self._run.parts for pair in part.named_parameters())
        self.steps.append({name: whole(tensor) for name, tensor in named})

    @hookimpl
    def titan_train_end(self, end: Any) -> None:
        tensors = self._run.observers.state_tensors() if not end.failed else {}
        self.averages = {name: whole(tensor) for name, tensor in tensors.items() if name.startswith("averaged_weights.")}


def trained(folder: str, settings: dict[str, object]) -> tuple[RunRecord, list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train in this process; return the record, the weights of each step, and the averages."""
    states = States()
    record = run_in(folder, settings, observers=(states,))
    return record, states.steps, states.averages


def by_hand(steps: list[dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """Return the averages of the weights of ``steps``."""
    taken = [steps[number - 1] for number in range(FIRST, STEPS + 1, FREQ)]
    if kind == "mean":
        return {name: torch.stack([one[name].double() for one in taken]).mean(0).float() for name in taken[0]}
    found = {name: tensor.double() for name, tensor in taken[0].items()}
    for one in taken[1:]:
        found = {name: DECAY * found[name] + (1 - DECAY) * one[name].double() for name in found}
    return {name: tensor.float() for name, tensor in found.items()}


def require_averages(averages: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert averages.pop("averaged_weights.states").item() == len(range(FIRST, STEPS + 1, FREQ))
    assert averages.keys() == {f"averaged_weights.{name}" for name in wanted}
    for name, tensor in wanted.items():
        torch.testing.assert_close(averages[f"averaged_weights.{name}"], tensor, rtol=2e-7, atol=1e-7, msg=name)


def on_ranks(
    gloo: GlooPool, ranks: int, folder: Path, settings: dict[str, object]
) -> tuple[RunRecord, list[dict[str, Tensor]], dict[str, Tensor]]:
    """:func:`trained` on several ranks, with the parameters of all pipeline stages."""
    results = gloo.run(ranks, trained, str(folder), settings)
    steps = [
        dict(pair for one in of_ranks for pair in one.items())
        for of_ranks in zip(*(one for _, one, _ in results), strict=True)
    ]
    return results[0][0], steps, dict(pair for _, _, one in results for pair in one.items())


@pytest.mark.parametrize("name", rows(MESHES, quick=("FSDP 2",), full=("FSDP 2", "TP 2", "PP 2", "CP 2", "DDP 2")))
def test_averages_on_a_mesh_are_those_of_its_weights(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    ranks, mesh = MESHES[name]
    _, steps, averages = on_ranks(gloo, ranks, tmp_path, {**ON, **mesh})
    require_averages(averages, by_hand(steps, "exponential"))


def test_the_mean_of_states(gloo: GlooPool, tmp_path: Path) -> None:
    settings = {**ON, "averages.kind": "mean", "averages.decay": 0.999}
    _, steps, averages = on_ranks(gloo, 1, tmp_path, settings)
    require_averages(averages, by_hand(steps, "mean"))


@pytest.mark.parametrize("name", rows(MESHES, quick=("FSDP 2",), full=("FSDP 2", "TP 2", "PP 2")))
def test_averages_on_the_host_are_those_on_the_device(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    """Bit for bit; also their validation, and also in a run that puts them there when it resumes, and back."""
    ranks, mesh = MESHES[name]
    settings = {**ON, **VALIDATED, **mesh}
    found = {}
    for folder, stops in {"device": {8: {}}, "host": {3: HOST, 6: {}, 8: HOST}}.items():
        for step, where in stops.items():
            results = gloo.run(ranks, trained, str(tmp_path), {
                **settings, **where, "training.stop_at_step": step, "job.dump_folder": folder
            })  # fmt: skip
        found[folder] = [(record.losses[-2:], record.named_validation[8, "averaged"], of) for record, _, of in results]
    for (losses, validated, device), (same_losses, same, host) in zip(*found.values(), strict=True):
        assert (losses, validated) == (same_losses, same)
        assert device.keys() == host.keys() and all(torch.equal(device[key], host[key]) for key in device)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, {}), (1, {}), pytest.param(2, {TP: 2}), pytest.param(2, {PP: 2})],
    ids=["FSDP", "one", "TP", "PP"],
)
def test_averages_resume_on_another_mesh(gloo: GlooPool, tmp_path: Path, ranks: int, mesh: dict[str, object]) -> None:
    _, before, _ = on_ranks(gloo, 2, tmp_path, {**ON, "training.stop_at_step": 5})
    _, steps, averages = on_ranks(gloo, ranks, tmp_path, {**ON, **mesh})
    assert len(before) == 5 and len(steps) == 3
    require_averages(averages, by_hand([*before, *steps], "exponential"))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {PP: 2}, {TP: 2}], ids=["FSDP 2", "PP 2", "TP 2"])
def test_averages_are_validated_and_change_nothing(gloo: GlooPool, tmp_path: Path, mesh: dict[str, object]) -> None:
    """The loss of averages is that of a model that has them as its weights, and the run is the one without averages."""
    plain = gloo.run(2, trained, str(tmp_path), {**ON, **VALIDATED, **mesh, "averages.kind": "none", "averages.decay": 0.999,
                                                 "job.dump_folder": "plain"})[0][0]  # fmt: skip
    found: dict[str, Tensor] = {}
    for record, _, averages in gloo.run(2, trained, str(tmp_path), {**ON, **VALIDATED, **mesh, "job.dump_folder": "run"}):
        assert (record.losses, record.validation) == (plain.losses, plain.validation)
        assert record.named_validation.keys() == {(4, "averaged"), (8, "averaged")}
        assert all(torch.equal(plain.final[name], tensor) for name, tensor in record.final.items() if name in plain.final)
        found.update(averages)
    seen = record.named_validation[8, "averaged"]
    assert seen != pytest.approx(record.validation[8][0], rel=1e-4)
    loss = gloo.run(1, validated_with, str(tmp_path), {**ON, **VALIDATED, "job.dump_folder": "other"}, found)[0]
    assert seen == pytest.approx(loss, rel=1e-6)


class Given:
    """Gives the model weights before the last validation."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self._run = run

    @hookimpl
    def titan_step_end(self, report: Any) -> None:
        for part in self._run.parts if report.step == STEPS else ():
            for name, tensor in part.named_parameters():
                # Not a change that the trainer sees, which is refused.
                tensor.data.copy_(self._weights[f"averaged_weights.{name}"])


def validated_with(folder: str, settings: dict[str, object], weights: dict[str, Tensor]) -> float:
    off = {"averages.kind": "none", "averages.decay": 0.999, "checkpoint.enable": "false"}
    return run_in(folder, {**settings, **off}, observers=(Given(weights),)).validation[STEPS][0]


@pytest.mark.full
def test_averages_are_extracted_from_a_checkpoint(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, averages = on_ranks(gloo, 2, in_tmp, {**ON, "checkpoint.interval": 1, "job.dump_folder": "run"})
    assert main(["checkpoint", "merge", "run", "averaged", "--averages"]) == 0
    assert capsys.readouterr().out == "wrote averaged: averages of step 8\n"
    found = stored("averaged")
    averages.pop("averaged_weights.states")
    assert found.keys() == {name.removeprefix("averaged_weights.") for name in averages}
    assert all(torch.equal(tensor, averages[f"averaged_weights.{name}"]) for name, tensor in found.items())
    assert main(["checkpoint", "merge", "run/checkpoint/step-1", "early", "--averages"]) == 2
    assert "step-1: was saved before the first average" in capsys.readouterr().err


@pytest.mark.full
def test_the_mean_of_five_checkpoints_loads_in_transformers(in_tmp: Path) -> None:
    from transformers import AutoModelForCausalLM

    small = "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 64}"
    saved = {"checkpoint.enable": "true", "checkpoint.interval": 1, "checkpoint.keep_latest_k": 0}
    run_recipe("llama3_debug", {**TINY, "model.args": small, **saved, "training.steps": 5, "job.dump_folder": "run"})
    assert main(["checkpoint", "merge", "run", "merged", "--last", "5"]) == 0
    assert main(["checkpoint", "convert", "merged", "exported"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained("exported").lm_head.weight
    of_steps = [stored(f"run/checkpoint/step-{step}")["output.weight"].double() for step in range(1, 6)]
    torch.testing.assert_close(theirs.detach(), torch.stack(of_steps).mean(0).float(), rtol=1e-7, atol=0)


def stored(path: str) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by parameter."""
    found = pick(path, None)
    assert found.manifest is not None
    names = [name for name in found.manifest.tensors if name.startswith("model.")]
    return {name.removeprefix("model."): read_whole(found.folder, found.manifest, name) for name in names}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"averages.start_step": 9}, "averages.start_step = 9: is after the last step, training.steps = 8"),
        (
            {**VALIDATED, "validation.dataset": "", "validation.sets": '[{name = "averaged", dataset = "stdlib"}]'},
            "validation.sets: a set has the name 'averaged'",
        ),
        (
            {**HOST, "training.enable_cpu_offload": "true"},
            "averages.enable_cpu_offload = true: has no effect with training.enable_cpu_offload",
        ),
        ({"averages.kind": "mean"}, 'averages.decay = 0.6: has no effect on averages.kind = "mean"'),
    ],
    ids=["too late", "a name that is taken", "on the host already", "decay of a mean"],
)
def test_settings_without_effect_are_refused(in_tmp: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        run_in(str(in_tmp), {**ON, **settings})
    assert says in str(caught.value)


def test_averages_on_the_host_take_none_of_the_devices_memory(fake_cuda: FakeCuda) -> None:
    """On fake CUDA tensors, with two ranks. The host waits for the device in no step, after the first."""
    off: dict[str, object] = {"training.steps": 3, "metrics.log_freq": 10}
    on = {**off, "averages.kind": "exponential"}
    none, device, host = (fake_cuda.train("llama3_debug", {**off, **one}, world_size=2) for one in ({}, on, {**on, **HOST}))
    kept = [sum(one.resident.values()) for one in (none, device, host)]
    parameters = none.resident[Owner.PARAMETERS]
    assert kept[1] - kept[0] >= parameters and kept[2] - kept[0] <= 1024  # the number of states
    assert device.on_host == none.on_host and host.on_host - none.on_host >= parameters
