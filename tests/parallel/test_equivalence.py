"""Every division and every recomputation trains as one device does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.gloo_pool import GlooPool
from harness.jobs import RunRecord, make_job, run_recipe, whole
from titan_core.errors import UserError

TINY: dict[str, object] = {
    "model.args": "{dim = 48, n_layers = 3, n_heads = 4, n_kv_heads = 2, ffn_dim = 100}",
    "training.seq_len": 48,
    "training.local_batch_size": 2,
    "training.global_batch_size": 16,
    "training.steps": 20,
    "lr_scheduler.warmup_steps": 5,
    "job.device": "cpu",
}


def run_in(folder: str, overrides: dict[str, object], weights: bool = True, recipe: str = "llama3_debug") -> RunRecord:
    os.chdir(folder)
    return run_recipe(recipe, {**TINY, **overrides}, weights=weights)


@pytest.fixture(scope="module")
def one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return gloo.run(1, run_in, str(tmp_path_factory.mktemp("one")), {})[0]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, {}),
        (4, {}),
        (2, {"parallelism.fsdp_reshard_after_forward": "always"}),
        (2, {"parallelism.fsdp_reshard_after_forward": "never"}),
        (2, {"training.local_batch_size": 8}),
        (2, {"parallelism.data_parallel_replicate_degree": 2}),
        (4, {"parallelism.data_parallel_replicate_degree": 2}),
        (2, {"parallelism.tensor_parallel_degree": 2}),
        (2, {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_sequence_parallel": "true"}),
        (2, {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_loss_parallel": "true"}),
        (2, {"parallelism.tensor_parallel_degree": 2, "activation_checkpoint.mode": "selective"}),
        (4, {"parallelism.tensor_parallel_degree": 2, "activation_checkpoint.mode": "full"}),
        (1, {"activation_checkpoint.mode": "full"}),
        (1, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"}),
        (2, {"activation_checkpoint.mode": "selective"}),
        (2, {"compile.enable": "true", "compile.backend": "aot_eager", "activation_checkpoint.mode": "selective"}),
    ],
    ids=str,
)
def test_losses_norms_and_weights_are_those_of_one_device(
    gloo: GlooPool, one_device: RunRecord, tmp_path: Path, ranks: int, overrides: dict[str, object]
) -> None:
    records: list[RunRecord] = gloo.run(ranks, run_in, str(tmp_path), overrides)
    for record in records:
        assert record.losses == pytest.approx(one_device.losses, rel=1e-5)
        assert record.grad_norms == pytest.approx(one_device.grad_norms, rel=1e-4)
    (record, *_) = records
    assert list(record.initial) == list(one_device.initial)
    for name, tensor in one_device.initial.items():
        assert torch.equal(record.initial[name], tensor), f"initial {name}"
        torch.testing.assert_close(record.final[name], one_device.final[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("ranks", "degree"), [(2, 1), (2, 2), (4, 2)])
def test_tied_embeddings(gloo: GlooPool, tmp_path: Path, ranks: int, degree: int) -> None:
    tied = {"model.args.tie_embeddings": "true", "training.steps": 5}
    (one,) = gloo.run(1, run_in, str(tmp_path), tied)
    many = gloo.run(ranks, run_in, str(tmp_path), {**tied, "parallelism.tensor_parallel_degree": degree})[0]
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert "output.weight" not in many.initial


def test_a_vocabulary_that_does_not_divide(gloo: GlooPool, tmp_path: Path) -> None:
    odd = {"model.args.vocab_size": 259, "training.steps": 5}
    (one,) = gloo.run(1, run_in, str(tmp_path), odd)
    (two, _) = gloo.run(2, run_in, str(tmp_path), {**odd, "parallelism.tensor_parallel_degree": 2})
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.grad_norms == pytest.approx(one.grad_norms, rel=1e-4)


def test_mixed_precision_is_the_same_on_one_device_and_on_two(gloo: GlooPool, one_device: RunRecord, tmp_path: Path) -> None:
    mixed = {"training.mixed_precision_param": "bfloat16"}
    (one,) = gloo.run(1, run_in, str(tmp_path), mixed)
    (two, _) = gloo.run(2, run_in, str(tmp_path), mixed)
    assert all(tensor.dtype == torch.float32 for tensor in two.final.values())
    assert two.losses == pytest.approx(one.losses, rel=2e-3)
    assert one.losses == pytest.approx(one_device.losses, rel=2e-2)
    assert one.losses != one_device.losses


def first_gradients(folder: str, overrides: dict[str, object]) -> dict[str, torch.Tensor]:
    """Every gradient of the first step, whole and before clipping."""
    from titan_core.hookspecs import hookimpl
    from titan_core.train import trainer
    from titan_core.train.grad_norm import local_gradients

    os.chdir(folder)
    gradients: dict[str, torch.Tensor] = {}

    class Parts:
        @hookimpl
        def titan_train_start(self, run: object) -> None:
            self.parts = run.parts  # type: ignore[attr-defined]

    parts = Parts()

    class KeepGradients(trainer.Trainer):
        def _train_step(self, data, num_targets, data_seconds):  # type: ignore[no-untyped-def]
            self.run_step(data.microbatches, num_targets)
            local_gradients(self.parameters)  # sums up what a transform left to be summed once a step
            gradients.update(
                {
                    name: whole(p.grad)
                    for part in parts.parts
                    for name, p in part.module.named_parameters()
                    if p.grad is not None
                }
            )
            raise KeyboardInterrupt

    original, trainer.Trainer = trainer.Trainer, KeepGradients  # type: ignore[misc]
    try:
        trainer.train(make_job("llama3_debug", {**TINY, **overrides}), [parts])
    except KeyboardInterrupt:
        pass
    finally:
        trainer.Trainer = original  # type: ignore[misc]
    return gradients


@pytest.fixture(scope="module")
def gradients_of_one_device(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return gloo.run(1, first_gradients, str(tmp_path_factory.mktemp("gradients")), {})[0]


def rope_dtype(folder: str) -> torch.dtype:
    """The type in which blocks are given the rotary table under mixed precision."""
    from titan_core.hookspecs import hookimpl
    from titan_core.train.trainer import train

    os.chdir(folder)
    seen: list[torch.dtype] = []

    class Spy:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            for block in run.parts[0].blocks().values():
                block.attention.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[1].dtype))

    train(make_job("llama3_debug", {**TINY, "training.mixed_precision_param": "bfloat16", "training.steps": 1}), [Spy()])
    assert len(set(seen)) == 1
    return seen[0]


def test_mixed_precision_leaves_rotary_tables_exact(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(1, rope_dtype, str(tmp_path)) == [torch.float32]


def bad_record(folder: str) -> str:
    """Only rank 1's share of the data holds a record without text."""
    os.chdir(folder)
    with open("a.jsonl", "w") as file:
        file.write('{"text": "%s"}\n' % ("words " * 100) * 200)
        file.write('{"text": null}\n' * 4)
    overrides = {**TINY, "training.dataset": "json", "training.dataset_path": "a.jsonl", "training.steps": 500}
    try:
        run_recipe("llama3_debug", overrides)
    except UserError as error:
        return str(error)
    return "no error"


def test_a_bad_record_on_one_rank_is_the_same_clear_error_on_all(gloo: GlooPool, tmp_path: Path) -> None:
    messages = gloo.run(2, bad_record, str(tmp_path))
    assert messages[0] == messages[1]
    assert "no text in field 'text'" in messages[0]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, {}),
        (2, {"parallelism.data_parallel_replicate_degree": 2}),
        (2, {"parallelism.tensor_parallel_degree": 2}),
        (2, {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_sequence_parallel": "true"}),
        (2, {"parallelism.tensor_parallel_degree": 2, "compile.enable": "true", "compile.backend": "aot_eager"}),
        (4, {"parallelism.tensor_parallel_degree": 2, "activation_checkpoint.mode": "selective"}),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_one_device(
    gloo: GlooPool,
    gradients_of_one_device: dict[str, torch.Tensor],
    tmp_path: Path,
    ranks: int,
    overrides: dict[str, object],
) -> None:
    gradients = gloo.run(ranks, first_gradients, str(tmp_path), overrides)[0]
    assert len(gradients) == len(gradients_of_one_device) == 3 * 9 + 3
    for name, gradient in gradients_of_one_device.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def local_bytes(folder: str) -> tuple[int, int]:
    """This rank's bytes of parameters, and the model's."""
    from titan_core.hookspecs import hookimpl
    from titan_core.train.trainer import train

    os.chdir(folder)
    sizes = []

    class Count:
        @hookimpl
        def titan_train_start(self, run: object) -> None:
            parameters = list(run.parts[0].module.parameters())  # type: ignore[attr-defined]
            sizes.append(sum(p.to_local().numel() * p.element_size() for p in parameters))
            sizes.append(sum(p.numel() * p.element_size() for p in parameters))

    train(make_job("llama3_debug", {**TINY, "training.steps": 1}), [Count()])
    return sizes[0], sizes[1]


def test_each_rank_holds_its_share(gloo: GlooPool, tmp_path: Path) -> None:
    for mine, whole_model in gloo.run(4, local_bytes, str(tmp_path)):
        assert mine <= 0.27 * whole_model


def different_seeds(folder: str) -> str:
    os.chdir(folder)
    try:
        run_recipe("llama3_debug", {**TINY, "training.seed": 100 + (os.environ["RANK"] == "1")})
    except UserError as error:
        return str(error)
    return "no error"


def test_a_rank_with_another_config_is_named(gloo: GlooPool, tmp_path: Path) -> None:
    for message in gloo.run(4, different_seeds, str(tmp_path)):
        assert message.startswith("rank 1: its job differs from rank 0's in config.training.seed (100 on rank 0, 101 here)")


def uneven_data(folder: str) -> tuple[str, int]:
    """Streams of very different lengths: rank 1's ends first."""
    os.chdir(folder)
    with open("a.jsonl", "w") as file:
        file.write("".join('{"text": "%s"}\n' % ("words " * (5 if index % 4 else 400)) for index in range(64)))
    record = run_recipe(
        "llama3_debug",
        {
            **TINY,
            "training.dataset": "json",
            "training.dataset_path": "a.jsonl",
            "data.on_end": "stop",
            "training.steps": 500,
        },
    )
    return record.reason, len(record.losses)


def test_data_that_ends_unevenly_stops_all_ranks_at_the_same_step(gloo: GlooPool, tmp_path: Path) -> None:
    (one,) = gloo.run(1, uneven_data, str(tmp_path))
    folder = tmp_path / "two"
    folder.mkdir()
    assert gloo.run(2, uneven_data, str(folder)) == [one, one]
    assert one[0] == "the dataset has ended"
    assert one[1] >= 1
