"""A step that is recorded and repeated computes what a step that runs anew computes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fake_cuda import FakeCuda, train_simulated
from harness.small_gpt import LAYOUT, SmallGPT
from harness.taped_step import Tape, record, taped_graphs
from titan_core.api import (
    Batch,
    ModelPart,
    ObjectiveFunction,
    PendingUpdate,
    Run,
    RunEnd,
    StepInput,
    StepRunner,
    UserError,
    Vocabulary,
    hookimpl,
)
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums, StepCounts
from titan_core.api.parallel.step import GradientAccumulation
from titan_core.model.next_token import NextToken
from titan_parallel import cuda_graphs
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, RunRecord, make_job, run_recipe

GRAPHS: dict[str, object] = {"training.disable_cuda_graphs": "false"}
STEPS: dict[str, object] = {**TINY, "training.steps": 6, "job.device": "cpu"}
"""The third of six steps is recorded."""
JOBS: dict[str, tuple[int, dict[str, object]]] = {
    "one device": (1, {}),
    "targets of different weight": (1, {"data.document_mask": "true"}),
    "dropout": (1, {"model.args.dropout": 0.2}),
    "bf16": (1, {"training.mixed_precision_param": "bfloat16"}),
    "DDP": (2, {"parallelism.data_parallel_replicate_degree": 2}),
    "FSDP": (2, {}),
    "TP": (2, {"parallelism.tensor_parallel_degree": 2, "model.args.n_kv_heads": 2}),
    "CP": (2, {"parallelism.context_parallel_degree": 2}),
}


def both(folder: str, overrides: dict[str, object]) -> tuple[RunRecord, RunRecord]:
    """Return the records of a run with graphs and of one without."""
    os.chdir(folder)
    with taped_graphs():
        graphed = run_recipe("tiny", {**STEPS, **overrides, **GRAPHS}, weights=True)
    return graphed, run_recipe("tiny", {**STEPS, **overrides}, weights=True)


@pytest.mark.parametrize("job", JOBS)
def test_repeated_steps_train_as_steps_that_run_anew(gloo: GlooPool, tmp_path: Path, job: str) -> None:
    ranks, overrides = JOBS[job]
    for graphed, plain in gloo.run(ranks, both, str(tmp_path), overrides):
        assert graphed.losses == plain.losses
        assert graphed.rank_losses == plain.rank_losses
        assert graphed.grad_norms == plain.grad_norms
        for name, tensor in plain.final.items():
            assert torch.equal(graphed.final[name], tensor), name


class Repeats:
    """Repeats the backward pass of each step before its update, as observers do."""

    def __init__(self) -> None:
        self.equal: list[bool] = []

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> None:
        before = [(tensor, tensor.grad) for tensor in self._parameters()]
        values = [gradient.clone() for _, gradient in before if gradient is not None]
        with update.repeat_backward():
            again = [tensor.grad for tensor, _ in before if tensor.grad is not None]
            self.equal.append(all(map(torch.equal, again, values)))
        self.equal.append(all(map(torch.equal, [tensor.grad for tensor, _ in before], values)))

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        self._parameters = run.parts[0].module.parameters


def test_a_step_that_is_repeated_keeps_the_gradients_of_the_graph(in_tmp: Path) -> None:
    with taped_graphs():
        found = run_recipe("tiny", {**STEPS, **GRAPHS}, observers=[repeats := Repeats()])
    assert repeats.equal == [True] * 12
    assert found.losses == run_recipe("tiny", STEPS).losses


class TestRecordedStep:
    """Recordings of a small model's step."""

    def step(self, monkeypatch: pytest.MonkeyPatch) -> cuda_graphs.GraphedStep:
        monkeypatch.setattr(cuda_graphs, "record", record)
        torch.manual_seed(0)
        self.part = ModelPart(SmallGPT(), LAYOUT, NextToken())
        self.calls = 0
        return cuda_graphs.GraphedStep(GradientAccumulation(self.part), [self.part])

    def inputs(self, number: int, length: int = 8) -> StepInput:
        tokens = torch.randint(0, 16, (2, length), generator=torch.Generator().manual_seed(number))
        batch = Batch(tokens, tokens.roll(-1, 1))
        counts = StepCounts({}, tokens.device, 1, True)
        weight = float(2 * length + number)
        return StepInput([batch], number, 0, weight, AuxiliaryLosses(1.0), MetricSums(), counts)

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad.clone() for parameter in self.part.module.parameters() if parameter.grad is not None]
        self.part.module.zero_grad()
        return found

    def same(self, step: StepRunner, inputs: StepInput) -> bool:
        """Whether ``step`` computes what the runner does."""
        loss, gradients = step(inputs), self.gradients()
        expected = GradientAccumulation(self.part)(inputs)
        return torch.equal(loss, expected) and all(map(torch.equal, gradients, self.gradients()))

    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> cuda_graphs.GraphedStep:
        step = self.step(monkeypatch)
        assert all(self.same(step, self.inputs(number)) for number in range(4))
        return step

    def test_other_shapes_run_without_the_graph(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        step = self.recorded(monkeypatch)
        assert all(self.same(step, self.inputs(number, length)) for number, length in ((4, 6), (5, 8), (6, 6)))
        assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [
            "step 4 is not a CUDA graph: its batches have other shapes than the recorded ones"
        ]

    def test_gradients_that_are_there_are_added_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = self.recorded(monkeypatch)
        step(self.inputs(7))
        once = [parameter.grad.clone() for parameter in self.part.module.parameters() if parameter.grad is not None]
        step(self.inputs(7))
        assert all(torch.allclose(twice, 2 * one) for twice, one in zip(self.gradients(), once, strict=True))

    def test_a_parameter_that_has_moved_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = self.recorded(monkeypatch)
        name, parameter = next(self.part.module.named_parameters())
        parameter.data = parameter.data.clone()
        with pytest.raises(UserError, match=f"'{name}' of the model: has been replaced since the step was recorded"):
            step(self.inputs(8))

    def test_a_replay_issues_copies_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = self.recorded(monkeypatch)
        assert step._recorded is not None
        monkeypatch.setattr(step._recorded, "_launch", lambda: None)
        inputs = self.inputs(9)
        with Tape() as tape:
            step(inputs)
        # Two tensors of the batch, the weight, the key, the counts before and after, and the loss.
        assert [str(call[0]).split(".")[1] for call in tape.calls] == [
            "copy_", "copy_", "fill_", "fill_", "zero_", "add_", "clone"
        ]  # fmt: skip

    def test_a_wait_of_the_host_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = self.step(monkeypatch)
        self.part.wrap_objective(lambda objective: Reads(objective))
        for number in range(cuda_graphs.WARM_UP):
            step(self.inputs(number))
            self.gradients()
        with pytest.raises(UserError, match=r"step 2 cannot be recorded: RuntimeError: operation not permitted"):
            step(self.inputs(2))

    def test_the_graph_is_freed_when_training_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        step = self.recorded(monkeypatch)
        loss = weakref.ref(step._recorded)
        step.titan_train_end(RunEnd(4, False, "done"))
        assert loss() is None


class Reads(ObjectiveFunction):
    """Reads its loss, for which the host waits."""

    def __init__(self, objective: ObjectiveFunction) -> None:
        self._objective = objective

    def __call__(self, logits: torch.Tensor, batch: Batch, vocabulary: Vocabulary) -> torch.Tensor:
        loss = self._objective(logits, batch, vocabulary)
        return loss * loss.detach().isfinite().item()


REFUSED: dict[str, tuple[int, dict[str, object], str]] = {
    "pipeline": (2, {"parallelism.pipeline_parallel_degree": 2}, "a pipeline's schedule runs on the host"),
    "CPU offload": (1, {"training.enable_cpu_offload": "true"}, "the host waits for the gradients"),
    "variable length": (
        1,
        {"data.document_mask": "true", "data.document_attention": "varlen", "training.mixed_precision_param": "bfloat16"},
        "other shapes in each step",
    ),
    "offloaded activations": (1, {"activation_checkpoint.offload_share": 1.0}, "copies of activations to the host"),
    "eager recomputation": (1, {"activation_checkpoint.mode": "full"}, "set compile.enable = true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_cannot_contain_is_refused(case: str) -> None:
    ranks, overrides, why = REFUSED[case]
    with pytest.raises(UserError, match=why):
        make_job("tiny", {**STEPS, **overrides, **GRAPHS}, ranks)


def test_a_job_on_the_cpu_says_that_it_has_no_graphs(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run_recipe("tiny", {**STEPS, **GRAPHS, "training.steps": 1})
    assert "training.disable_cuda_graphs = false has no effect: this job computes on the CPU" in caplog.text


def repeated_on_fake_cuda(overrides: dict[str, object], ranks: int) -> Any:
    """Train with graphs whose kernels the host launches one by one, from the tensors of the recording."""

    def launched(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        recorded = [step()]

        def launch() -> None:
            if recorded:  # its first launch
                recorded.pop()
            else:
                with torch.enable_grad():
                    step()

        return recorded[0], launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "record", launched)
        patch.setattr(cuda_graphs, "has_values", lambda: True)
        return train_simulated("tiny", {**TINY, **GRAPHS, **overrides}, ranks, 0, True, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("ranks", [1, 4])
def test_nothing_waits_on_fake_cuda(fake_cuda: FakeCuda, ranks: int) -> None:
    bf16: dict[str, object] = {
        "training.mixed_precision_param": "bfloat16", "training.steps": 6, "metrics.log_freq": 100,
        "training.global_batch_size": 4 * ranks,
    }  # fmt: skip
    found, plain = fake_cuda.call(repeated_on_fake_cuda, bf16, ranks), fake_cuda.train("tiny", {**TINY, **bf16}, ranks)
    assert [wait for step in found.steps[1:5] for wait in step.waits] == []
    assert [step.collectives for step in found.steps] == [step.collectives for step in plain.steps]


def test_a_simulation_counts_the_kernels_of_the_step(fake_cuda: FakeCuda) -> None:
    settings = {**TINY, "training.steps": 4}
    graphs, plain = (fake_cuda.train("tiny", {**settings, **more}) for more in (GRAPHS, {}))
    assert [step.phases for step in graphs.steps] == [step.phases for step in plain.steps]
