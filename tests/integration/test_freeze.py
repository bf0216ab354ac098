"""Frozen parameters (``training.freeze``): training equals a loop in plain torch, on one device and on meshes, and a run
that freezes and unfreezes parameters continues on any mesh."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from harness.quick import rows
from harness.staged import RECIPE, run_staged, write_recipe
from titan_core.api import UserError, hookimpl, matches
from titan_core.data.loader import data_loader
from titan_core.data.streams import OpenedData
from titan_core.model.build import build_whole
from titan_core.model.stand_in import first_alike
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_recipe
from titan_testing.meshes import CP, DR, FAST, HEADS, PP, SCHEDULE, TP, run_in
from titan_testing.tiny_model import angles

FREEZE = "training.freeze"
BEGIN = ["tok_embeddings.*", "layers.[012].*"]
"""The first stage of a pipeline of two, and more."""
MIXED = ["tok_embeddings.*", "layers.*.wq.weight", "*norm.weight", "layers.2.*"]
"""Some parameters of what FSDP gathers together."""
END = ["layers.[23].*", "norm.*", "output.*"]
"""The last stage of a pipeline of two."""
MESHES: dict[str, tuple[int, list[str], dict[str, object]]] = {
    "FSDP 2": (2, MIXED, {}),
    "FSDP 2, the beginning": (2, BEGIN, {"activation_checkpoint.mode": "full"}),
    "DDP 2": (2, MIXED, {DR: 2}),
    "TP 2": (2, MIXED, {TP: 2}),
    "TP 2, the beginning": (2, BEGIN, {TP: 2, "activation_checkpoint.mode": "selective"}),
    "CP 2": (2, MIXED, {CP: 2}),
    "CP 2 by heads": (2, BEGIN, {CP: 2, HEADS: 2}),
    "PP 2": (2, MIXED, {PP: 2}),
    "PP 2, a frozen first rank": (2, BEGIN, {PP: 2, SCHEDULE: "1F1B"}),
    "PP 2, a frozen last rank": (2, END, {PP: 2, SCHEDULE: "1F1B"}),
    "PP 2, InterleavedZeroBubble": (2, BEGIN, {PP: 2, SCHEDULE: "InterleavedZeroBubble"}),
    "PP 2, ZBVZeroBubble": (2, BEGIN, {PP: 2, SCHEDULE: "ZBVZeroBubble"}),
    "FSDP x PP": (4, BEGIN, {PP: 2}),
    "FSDP x PP, DualPipeV": (4, BEGIN, {PP: 2, SCHEDULE: "DualPipeV"}),
    "TP x PP": (4, BEGIN, {TP: 2, PP: 2}),
}


def require_frozen(record: RunRecord, patterns: list[str]) -> None:
    """Assert that exactly the parameters that match are unchanged, to the bit, and had no gradient."""
    for name, before in record.initial.items():
        frozen = matches(name, patterns)
        assert torch.equal(record.final[name], before) is frozen, name
        assert (name not in record.gradients) is frozen, name


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> Any:
    """Return a function that returns the run on one device with patterns."""
    known: dict[str, RunRecord] = {}

    def run(patterns: list[str]) -> RunRecord:
        key = json.dumps(patterns)
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            known[key] = gloo.run(1, run_in, str(folder), {**FAST, FREEZE: key})[0]
        return known[key]

    return run


def backward(model: Any, loader: Any) -> float:
    """Add the gradients of the next step; return its loss."""
    microbatches = loader.next_step().microbatches
    count = sum(int((batch.targets >= 0).sum()) for batch in microbatches)
    total = 0.0
    for batch in microbatches:
        logits = model(batch.tokens)
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("patterns", [MIXED, BEGIN, END], ids=["mixed", "begin", "end"])
def test_training_is_that_of_a_loop_in_torch(in_tmp: Path, patterns: list[str], on_one_device: Any) -> None:
    """The model, its data and the learning rates are Titan's; gradients, their norm, clipping and AdamW are torch's."""
    record: RunRecord = on_one_device(patterns)
    require_frozen(record, patterns)
    job = make_job("tiny", FAST)
    model: Any = job.model.build()
    model.load_state_dict(record.initial)
    model.angles.copy_(angles(job.model_args))  # type: ignore[arg-type]
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not matches(name, patterns))
        if parameter.requires_grad:
            (others if parameter.dim() < 2 else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=0.1)
    loader = data_loader(job, OpenedData.of(job).training, 0)
    for step, rate in enumerate(record.learning_rates):
        assert record.losses[step] == pytest.approx(backward(model, loader), rel=1e-6)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert record.grad_norms[step] == pytest.approx(float(norm), rel=1e-5)
        update(optimizer, rate)
    loader.close()
    require_close(dict(model.named_parameters()), record.final)


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.detach(), expected[name], rtol=1e-4, atol=2e-6, msg=name)


QUICK = ["FSDP 2", "TP 2", "CP 2", "PP 2", "PP 2, a frozen first rank", "PP 2, ZBVZeroBubble"]


@pytest.mark.parametrize("name", rows(MESHES, QUICK))
def test_training_on_a_mesh_is_that_on_one_device(gloo: GlooPool, tmp_path: Path, name: str, on_one_device: Any) -> None:
    ranks, patterns, mesh = MESHES[name]
    one: RunRecord = on_one_device(patterns)
    seen: set[str] = set()
    for record in gloo.run(ranks, run_in, str(tmp_path), {**FAST, **mesh, FREEZE: json.dumps(patterns)}):
        assert record.losses == pytest.approx(one.losses, rel=1e-6)
        assert record.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        require_frozen(record, patterns)
        require_close(record.final, one.final)
        seen |= record.final.keys()
    assert seen == one.final.keys()


OPTIMIZERS: dict[str, dict[str, object]] = {
    "Muon": {"optimizer.name": "Muon"},
    "MuAdamW": {"optimizer.name": "MuAdamW", "mup.base": "{dim = 24, n_heads = 2, n_kv_heads = 1, ffn_dim = 50}"},
    "AdamWBF16": {"optimizer.name": "AdamWBF16"},
}


@pytest.mark.parametrize("name", rows(OPTIMIZERS, ["Muon"]))
def test_a_rank_without_parameters_to_train_builds_any_optimizer(gloo: GlooPool, tmp_path: Path, name: str) -> None:
    settings = {**FAST, **OPTIMIZERS[name], FREEZE: json.dumps(END), "training.steps": 3, "checkpoint.enable": "true"}
    (one,) = gloo.run(1, run_in, str(tmp_path), {**settings, "job.dump_folder": "one"})
    for record in gloo.run(2, run_in, str(tmp_path), {**settings, PP: 2, "job.dump_folder": "two"}):
        assert record.losses == pytest.approx(one.losses, rel=1e-5)
        require_frozen(record, END)


FROZEN_STAGES = (
    RECIPE.partition("[[stages]]")[0]
    + """
[averages]
kind = "exponential"

[[stages]]
name = "frozen"
at_step = 4

[stages.training]
freeze = ["tok_embeddings.*", "layers.0.*", "norm.*"]

[[stages]]
name = "thawed"
at_step = 8

[stages.training]
freeze = ["layers.0.*"]
"""
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, gloo: GlooPool) -> RunRecord:
    """The uninterrupted run of three stages on one device."""
    folder = tmp_path_factory.mktemp("whole")
    write_recipe(folder, FROZEN_STAGES)
    return gloo.run(1, run_staged, str(folder), {})[0]


RESUMED: dict[str, list[tuple[int | None, int, dict[str, object]]]] = {
    "within each stage": [(2, 1, {}), (6, 2, {}), (10, 2, {TP: 2}), (None, 2, {CP: 2})],
    "where a stage ends": [(4, 2, {PP: 2}), (8, 2, {TP: 2}), (9, 2, {DR: 2}), (None, 2, {PP: 2})],
    "on all dimensions": [(3, 4, {TP: 2}), (5, 4, {PP: 2}), (11, 1, {}), (None, 4, {TP: 2, PP: 2})],
}
"""Step to stop at, ranks and mesh of each start."""


@pytest.mark.parametrize("name", rows(RESUMED, ["within each stage"]))
def test_stages_that_freeze_and_unfreeze_resume_on_other_meshes(
    gloo: GlooPool, tmp_path: Path, whole: RunRecord, name: str
) -> None:
    write_recipe(tmp_path, FROZEN_STAGES)
    losses: list[float] = []
    final: dict[str, Tensor] = {}
    for stop, ranks, mesh in RESUMED[name]:
        settings = {**mesh, **({} if stop is None else {"training.stop_at_step": stop})}
        records = gloo.run(ranks, run_staged, str(tmp_path), settings)
        losses += records[0].losses
        final = {key: tensor for record in records for key, tensor in record.final.items()}
    assert losses == pytest.approx(whole.losses, rel=1e-6) and len(losses) == 12
    assert final.keys() == whole.final.keys()
    require_close(final, whole.final)


def test_unfrozen_parameters_start_with_fresh_state_of_adamw(gloo: GlooPool, in_tmp: Path, whole: RunRecord) -> None:
    """The run of three stages as a loop in torch: one AdamW for each parameter, made anew where it is no longer frozen."""
    write_recipe(in_tmp, FROZEN_STAGES)
    (start,) = gloo.run(1, run_staged, str(in_tmp), {"training.stop_at_step": 0})
    job = make_job("staged.toml")
    model: Any = job.model.build()
    model.load_state_dict(start.initial, strict=False)
    for name, buffer in model.named_buffers():
        buffer.copy_(next(compute() for pattern, compute in job.model.layout.buffers.items() if matches(name, [pattern])))
    states: dict[str, torch.optim.Optimizer] = {}
    loader = data_loader(job, OpenedData.of(job).training, 0)
    losses = []
    for step, rate in enumerate(whole.learning_rates):
        patterns = job.stages[job.stage_after(step)].config.value(FREEZE)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not matches(name, patterns))
            if not parameter.requires_grad:
                states.pop(name, None)
            elif name not in states:
                decay = 0.0 if parameter.dim() < 2 else 0.1
                states[name] = torch.optim.AdamW([parameter], betas=(0.9, 0.95), weight_decay=decay)
        losses.append(backward(model, loader))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in states.values():
            update(optimizer, rate)
    loader.close()
    assert whole.losses == pytest.approx(losses, rel=1e-6)
    require_close(dict(model.named_parameters()), whole.final)


def test_a_resume_with_other_frozen_parameters_must_be_allowed(gloo: GlooPool, tmp_path: Path) -> None:
    write_recipe(tmp_path, RECIPE.partition("[[stages]]")[0])
    first = {FREEZE: '["tok_embeddings.*", "layers.0.*"]', "training.stop_at_step": 2}
    gloo.run(1, run_staged, str(tmp_path), first)
    change: dict[str, object] = {FREEZE: '["layers.0.*", "norm.*"]', "training.stop_at_step": 4}
    with pytest.raises(RuntimeError, match=r"was saved with .*tok_embeddings(.|\n)*allow_changed"):
        gloo.run(1, run_staged, str(tmp_path), change)
    messages = gloo.run(2, logged, str(tmp_path), {**change, PP: 2, "checkpoint.allow_changed": f'["{FREEZE}"]'})
    says = "1 parameters are no longer frozen and start with fresh optimizer state; the state of 1 that are frozen now"
    assert sum(says in message for message in messages[0]) == 1


def test_a_group_that_is_no_longer_frozen_has_the_rate_of_the_schedule(gloo: GlooPool, tmp_path: Path) -> None:
    write_recipe(tmp_path, RECIPE.partition("[[stages]]")[0])
    groups: dict[str, object] = {"optimizer.param_groups": '[{pattern = "tok_embeddings.*", lr_scale = 0.5}]'}
    gloo.run(1, run_staged, str(tmp_path), {**groups, FREEZE: '["tok_embeddings.*"]', "training.stop_at_step": 2})
    rates = gloo.run(1, rates_of, str(tmp_path), {**groups, "checkpoint.allow_changed": f'["{FREEZE}"]'})[0]
    assert len(rates) == 10
    assert [halved for _, halved in rates] == pytest.approx([rate / 2 for rate, _ in rates], rel=1e-12)


def rates_of(folder: str, settings: dict[str, object]) -> list[list[float]]:
    """Train, and return the learning rates of the groups in each step."""
    found: list[list[float]] = []

    class Keep:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            self._groups = run.state.optimizer.param_groups

        @hookimpl
        def titan_gradients_complete(self) -> None:
            found.append([float(group["lr"]) for group in self._groups])

    run_staged(folder, settings, (Keep(),))
    return found


def logged(folder: str, settings: dict[str, object]) -> list[str]:
    """Train, and return what is logged."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, of_package = Keep(), logging.getLogger("titan_ckpt")
    level = of_package.level
    of_package.addHandler(handler)
    of_package.setLevel(logging.INFO)
    try:
        run_staged(folder, settings)
    finally:
        of_package.removeHandler(handler)
        of_package.setLevel(level)
    return found


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "nothing": (
        {FREEZE: '["layers.0.*", "layer.1.*"]'},
        r"training.freeze = .?layer\.1\.\*.?: the pattern matches no parameter",
    ),
    "everything": ({FREEZE: '["*"]'}, "freezes all parameters"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_error(in_tmp: Path, name: str) -> None:
    settings, says = MISTAKES[name]
    with pytest.raises(UserError, match=says) as error:
        run_recipe("tiny", {**FAST, **settings})
    assert len(error.value.problems) == 1


def test_a_mistake_in_a_later_stage_is_found_before_the_first_step(in_tmp: Path) -> None:
    write_recipe(in_tmp, FROZEN_STAGES.replace('freeze = ["layers.0.*"]', 'freeze = ["layers.7.*"]'))
    with pytest.raises(UserError, match=r"stage 'thawed': .*layers\.7.*matches no parameter"):
        run_staged(str(in_tmp), {})
    assert not list(in_tmp.glob("outputs/*/checkpoints/*"))


def test_blocks_that_are_frozen_are_of_a_kind_of_their_own() -> None:
    """Trials and small copies of a model have one block of each kind."""
    job = make_job("tiny", {**FAST, FREEZE: '["layers.[01].*.wq.weight", "layers.3.*"]'})
    model = build_whole(job)
    kinds = {"layers.0": "layers.0", "layers.1": "layers.0", "layers.2": "layers.2", "layers.3": "layers.3"}
    assert first_alike(model, job.model.layout) == kinds
