"""The least memory of a job's state: what ``titan job show`` prints, and the warning of ``titan train``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from harness.fake_cuda import FakeCuda
from titan_testing.jobs import make_job

pytest.importorskip("titan_simulate")
from titan_core.api.config.sections import TrainingSection
from titan_core.cli.main import main
from titan_simulate.estimate import job_memory
from titan_simulate.estimate.job_memory import least_state

LARGE = {"model.args": "{dim = 8192, n_layers = 8, n_heads = 64, n_kv_heads = 8, ffn_dim = 28672}"}


def test_one_device_holds_every_parameter_and_adam_two_values_more() -> None:
    job = make_job("tiny", {})
    found, parameters = least_state(job), job.model.num_params
    assert (found.parameters, found.gradients, found.optimizer_state) == (4 * parameters, 4 * parameters, 8 * parameters)
    batch, layout = job.batch, job.model.layout
    assert found.block_inputs == layout.num_blocks * batch.local_size * batch.seq_len * layout.dim * 4


def test_a_reference_model_has_weights_only() -> None:
    job = make_job("tiny", {})
    alone, both = least_state(job), least_state(replace(job, reference=job))
    assert both.parameters == 2 * alone.parameters
    assert (both.gradients, both.optimizer_state) == (alone.gradients, alone.optimizer_state)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_frozen_parameters_have_weights_only(tied: str) -> None:
    settings = {"model.args": f"{{tie_embeddings = {tied}}}", "training.freeze": '["output.weight", "layers.*norm.weight"]'}
    job = make_job("tiny", settings)
    found, layout = least_state(job), job.model.layout
    frozen = layout.dim * (layout.vocab_size + 2 * layout.num_blocks)
    assert found.parameters == 4 * job.model.num_params
    assert (found.gradients, found.optimizer_state) == (found.parameters - 4 * frozen, 2 * (found.parameters - 4 * frozen))


def test_the_state_of_an_unknown_optimizer_counts_as_nothing() -> None:
    job = make_job("tiny", {})
    assert least_state(replace(job, optimizer=replace(job.optimizer, costs=None))).optimizer_state == 0


def test_job_show_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "show", "tiny"]) == 0
    assert "memory" in capsys.readouterr().out
    assert main(["job", "show", "tiny", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["facts"]["memory"]
    assert shown["state"] == least_state(make_job("tiny", {})).state


@pytest.mark.parametrize(("short", "warned"), [(1, True), (0, False)])
def test_a_job_is_warned_about_only_if_its_state_exceeds_the_device(
    short: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job("tiny", LARGE)
    memory = least_state(job).state - short
    monkeypatch.setattr(job_memory, "_device_memory", lambda choice: (memory, "the device"))
    with caplog.at_level(logging.WARNING):
        job_memory.warn_if_too_large(job)
    assert ("cannot fit" in caplog.text) is warned


def test_a_small_job_does_not_ask_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_memory, "_device_memory", lambda choice: pytest.fail("asked"))
    job_memory.warn_if_too_large(make_job("tiny", {}))


def test_ranks_of_a_machine_share_the_memory_of_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = job_memory._device_memory("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared, what = job_memory._device_memory("cpu")
    assert shared == whole // 4 and "4 ranks" in what


def test_a_gpu_says_what_it_has(fake_cuda: FakeCuda) -> None:
    memory, what = fake_cuda.run(job_memory._device_memory, "cuda")
    assert (memory, what) == (80 * 2**30, "NVIDIA H100 80GB HBM3")


def test_memory_on_the_device_is_not_judged_where_it_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_memory, "_device_memory", lambda choice: pytest.fail("asked"))
    job = make_job("tiny", LARGE)
    sections = dict(job.config.sections)
    sections[TrainingSection] = sections[TrainingSection].model_copy(update={"enable_cpu_offload": True})
    job_memory.warn_if_too_large(replace(job, config=replace(job.config, sections=sections)))
