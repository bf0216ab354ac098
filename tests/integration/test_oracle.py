"""A run computes the same as plain torch: losses, gradient norms, learning rates and final weights match those of
:mod:`harness.oracle`, a second implementation that shares no code with Titan. Only these tests can find an error that is the
same on every mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import oracle, quick
from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, run_recipe
from titan_testing.meshes import CP, DR, PP, SCHEDULE, TP

HEADS, STEPS, SEQ_LEN, SEQUENCES, SHARDS = 4, 12, 16, 4, 2
LR, EPS = 4e-3, 1e-3
DECAYED, UNDECAYED = oracle.Group((), LR, 0.5), oracle.Group(("norm",), LR, 0.0)


@dataclass(frozen=True)
class Case:
    """Settings of a run and of the oracle."""

    overrides: dict[str, object]
    factors: tuple[float, ...]
    """The learning rate of each step as a share of the peak, computed by hand."""
    groups: Sequence[oracle.Group] = (UNDECAYED, DECAYED)
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    betas: tuple[float, float] = (0.8, 0.7)
    max_norm: float = 1.0
    document_mask: bool = True

    def titan(self) -> dict[str, object]:
        """The settings of the run."""
        return {
            # The vocabulary is odd, and documents use most of its upper half. The width suits two ranks and two heads.
            "model.args": "{dim = 32, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 48, vocab_size = 259}",
            "training.dataset": "json",
            "training.dataset_path": "documents.jsonl",
            "training.steps": STEPS,
            "training.seq_len": SEQ_LEN,
            "training.global_batch_size": SEQUENCES,
            "training.local_batch_size": 1,
            "training.max_norm": self.max_norm,
            "data.logical_shards": SHARDS,
            "data.document_mask": str(self.document_mask).lower(),
            "optimizer.lr": LR,
            "optimizer.beta1": self.betas[0],
            "optimizer.beta2": self.betas[1],
            "optimizer.eps": EPS,
            "optimizer.weight_decay": 0.5,
            "optimizer.name": self.optimizer.__name__,
            "lr_scheduler.decay_type": "linear",
            "lr_scheduler.min_lr_factor": 0.0,
            "job.device": "cpu",
            **self.overrides,
        }


# Three steps of warmup, a plateau of four, and a decay over the last six (half of twelve). The first step of the decay is a
# sixth below the plateau.
WARMUP = (1 / 3, 2 / 3, 1.0)
LINEAR: dict[str, object] = {"lr_scheduler.warmup_steps": 3, "lr_scheduler.decay_ratio": 0.5}
DEFAULT = Case(LINEAR, (*WARMUP, 1.0, 1.0, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6))
CASES = {
    "AdamW": DEFAULT,
    "no document mask": Case(LINEAR, DEFAULT.factors, document_mask=False),
    "2 sequences at a time": Case({**LINEAR, "training.local_batch_size": 2}, DEFAULT.factors),
    "4 sequences at a time": Case({**LINEAR, "training.local_batch_size": 4}, DEFAULT.factors),
    "for-loop": Case({**LINEAR, "optimizer.implementation": "for-loop"}, DEFAULT.factors),
    "foreach": Case({**LINEAR, "optimizer.implementation": "foreach"}, DEFAULT.factors),
    "no clipping": Case(LINEAR, DEFAULT.factors, max_norm=0.0),
    "always clipping": Case(LINEAR, DEFAULT.factors, max_norm=0.1),
    "never clipping": Case(LINEAR, DEFAULT.factors, max_norm=1e3),
    "Adam, no warmup, sqrt to a floor": Case(
        {
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_ratio": 0.25,
            "lr_scheduler.decay_type": "sqrt",
            "lr_scheduler.min_lr_factor": 0.1,
        },
        (*[1.0] * 10, 0.1 + 0.9 * 0.422649730810374, 0.1 + 0.9 * 0.183503419072274),  # 1 - sqrt(1/3), 1 - sqrt(2/3)
        optimizer=torch.optim.Adam,
        betas=(0.5, 0.9),
    ),
    "no ratio: cosine from the warmup on": Case(
        {"lr_scheduler.warmup_steps": 8, "lr_scheduler.decay_type": "cosine", "lr_scheduler.min_lr_factor": 0.2},
        # Of the remaining four steps, the first is still at the peak; cosines of 1/4, 2/4 and 3/4 of half a turn follow.
        (*(n / 8 for n in range(1, 9)), 1.0, 0.2 + 0.8 * 0.85355339059327, 0.2 + 0.8 * 0.5, 0.2 + 0.8 * 0.14644660940673),
    ),
    "groups of one's own": Case(
        {
            **LINEAR,
            "optimizer.param_groups": '[{pattern = "*.wq.weight", weight_decay = 0.0, lr_scale = 0.5}, '
            '{pattern = "*attention*", lr_scale = 2.0}, {pattern = "*norm*", weight_decay = 0.9, lr_scale = 0.25}]',
        },
        DEFAULT.factors,
        groups=(
            oracle.Group((".wq.weight",), LR / 2, 0.0),
            oracle.Group(("attention",), LR * 2, 0.5),
            oracle.Group(("norm",), LR / 4, 0.9),
            DECAYED,
        ),
    ),
}  # fmt: skip


def run_in(folder: str, overrides: dict[str, object], observers: tuple[Any, ...] = ()) -> RunRecord:
    os.chdir(folder)
    return run_recipe("llama3_debug", overrides, weights=True, observers=observers)


@pytest.fixture
def folder(in_tmp: Path) -> str:
    oracle.write_documents(in_tmp / "documents.jsonl")
    return str(in_tmp)


def expected(case: Case, initial: dict[str, torch.Tensor], skipped: Sequence[int] = ()) -> oracle.Outcome:
    steps = oracle.read(STEPS, seq_len=SEQ_LEN, sequences=SEQUENCES, shards=SHARDS, document_mask=case.document_mask)
    return oracle.train(
        initial, steps, case.groups, heads=HEADS, factors=case.factors, optimizer=case.optimizer, betas=case.betas, eps=EPS,
        max_norm=case.max_norm, skipped=skipped,
    )  # fmt: skip


def require_expected(records: Sequence[RunRecord], case: Case, outcome: oracle.Outcome) -> None:
    final = {name: tensor for record in records for name, tensor in record.final.items()}
    gradients = {name: tensor for record in records for name, tensor in record.gradients.items()}
    for record in records:
        assert record.targets == outcome.targets
        assert record.learning_rates == pytest.approx([LR * factor for factor in case.factors], rel=1e-12)
        assert record.losses == pytest.approx(outcome.losses, rel=1e-6)
        for rows, of_ranks in zip(outcome.rows, record.rank_losses, strict=True):
            each = len(rows) // len(of_ranks)
            parts = [rows[start : start + each] for start in range(0, len(rows), each)]
            means = [sum(loss for loss, _ in part) / sum(count for _, count in part) for part in parts]
            assert of_ranks == pytest.approx(means, rel=1e-6)
        assert record.grad_norms == pytest.approx(outcome.grad_norms, rel=2e-6)
    assert set(final) == set(gradients) == set(outcome.final)
    for name, tensor in outcome.final.items():
        assert (final[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
        assert (gradients[name] - outcome.gradients[name]).norm() <= 2e-6 * outcome.gradients[name].norm(), (
            f"gradient {name}"
        )


QUICK = ("AdamW", "always clipping", "Adam, no warmup, sqrt to a floor", "groups of one's own")


@pytest.mark.parametrize("case", quick.quick_rows([pytest.param(case, id=name) for name, case in CASES.items()], QUICK))
def test_a_run_is_that_of_plain_torch(folder: str, case: Case) -> None:
    record = run_in(folder, case.titan())
    require_expected([record], case, expected(case, record.initial))


def test_the_default_case_covers_clipping_and_uneven_targets(folder: str) -> None:
    """Norms are on both sides of the limit, and steps and microbatches have unequal numbers of targets."""
    record = run_in(folder, DEFAULT.titan())
    assert min(record.grad_norms) < 0.9 * DEFAULT.max_norm < 1.1 * DEFAULT.max_norm < max(record.grad_norms)
    steps = oracle.read(STEPS, seq_len=SEQ_LEN, sequences=SEQUENCES, shards=SHARDS, document_mask=True)
    assert len({int((row != -100).sum()) for step in steps for row in step.targets}) > 2
    assert len(set(record.targets)) > 2


class Poisons:
    """Sets the loss of some steps to NaN."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.weight = run.parts[0].module.get_parameter("norm.weight")

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        self.step, self.before = step, self.weight.detach().clone()
        if step in self.steps:
            self.weight.data.fill_(float("nan"))

    @hookimpl
    def titan_before_update(self) -> None:
        if self.step in self.steps:
            self.weight.data.copy_(self.before)


def test_a_skipped_step_leaves_out_its_update_and_nothing_else(folder: str) -> None:
    """The step's learning rate and data count as used; the optimizer's step count does not increase."""
    skip = {**DEFAULT.titan(), "training.on_nan": "skip"}
    record = run_in(folder, skip, (Poisons(1, 6, 7),))
    assert record.skipped == [1, 6, 7]
    outcome = expected(DEFAULT, record.initial, skipped=(1, 6, 7))
    finite = [number for number in range(STEPS) if number + 1 not in record.skipped]
    assert [record.losses[n] for n in finite] == pytest.approx([outcome.losses[n] for n in finite], rel=1e-6)
    assert record.learning_rates == pytest.approx([LR * factor for factor in DEFAULT.factors], rel=1e-12)
    for name, tensor in outcome.final.items():
        assert (record.final[name] - tensor).norm() <= 1e-6 * tensor.norm(), name


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        (1, 2),
        (4, -1),
        pytest.param(1, -1, marks=pytest.mark.full),
        pytest.param(4, 2, marks=pytest.mark.full),
    ],
)
def test_validation_is_that_of_plain_torch(folder: str, local: int, steps: int) -> None:
    """Each token of the data is read once, and the last windows are short. ``validation.steps`` selects the first global
    batches."""
    settings: dict[str, object] = {
        "validation.enable": "true",
        "validation.dataset": "json",
        "validation.dataset_path": "documents.jsonl",
        "validation.freq": 12,
        "validation.steps": steps,
        "training.local_batch_size": local,
    }
    record = run_in(folder, {**DEFAULT.titan(), **settings})
    batches = oracle.read_once(seq_len=SEQ_LEN, sequences=SEQUENCES, shards=SHARDS)[: steps if steps > 0 else None]
    total, targets = oracle.summed_loss(record.final, batches, HEADS)
    assert record.validation.keys() == {12}
    assert record.validation[12][1] == targets
    assert record.validation[12][0] == pytest.approx(total / targets, rel=1e-6)


MESHES: dict[str, tuple[int, dict[str, object]]] = {
    "FSDP": (2, {}),
    "TP": (2, {TP: 2}),
    "TP without SP": (2, {TP: 2, "parallelism.disable_sequence_parallel": "true"}),
    "TP without loss parallelism": (2, {TP: 2, "parallelism.disable_loss_parallel": "true"}),
    "PP": (2, {PP: 2, SCHEDULE: "1F1B"}),
    "CP": (2, {CP: 2}),
    "DDP x TP": (4, {DR: 2, TP: 2}),
}


@pytest.mark.parametrize("mesh", quick.rows(MESHES, ("FSDP", "TP", "PP")))
def test_a_run_on_a_mesh_is_that_of_plain_torch(gloo: GlooPool, folder: str, mesh: str) -> None:
    ranks, degrees = MESHES[mesh]
    records = gloo.run(ranks, run_in, folder, {**DEFAULT.titan(), **degrees})
    initial = {name: tensor for record in records for name, tensor in record.initial.items()}
    require_expected(records, DEFAULT, expected(DEFAULT, initial))


def test_the_oracle_matches_llama_in_transformers(folder: str) -> None:
    """A third implementation rules out that Titan and the oracle share a mistake."""
    import transformers

    record = run_in(folder, {**DEFAULT.titan(), "training.steps": 1})
    width = 32 // HEADS
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    theirs = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    name_of = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
               "output.weight": "lm_head.weight"}  # fmt: skip
    for layer in range(2):
        for ours, other in theirs.items():
            name_of[f"layers.{layer}.{ours}.weight"] = f"model.layers.{layer}.{other}.weight"

    def order(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """transformers rotates feature i of a head with feature i + half; Meta's Llama rotates neighbours."""
        if not name.endswith(("wq.weight", "wk.weight")):
            return tensor
        return tensor.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)

    state = {other: order(ours, record.initial[ours]) for ours, other in name_of.items()}
    model.load_state_dict(state)
    (step,) = oracle.read(1, seq_len=SEQ_LEN, sequences=SEQUENCES, shards=SHARDS, document_mask=True)
    seen = (step.documents[:, :, None] == step.documents[:, None, :]).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    logits = model(step.tokens, attention_mask=mask, position_ids=step.positions).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), step.targets.flatten())
    loss.backward()
    assert record.losses == pytest.approx([loss.item()], rel=1e-6)
    for ours, other in name_of.items():
        gradient = order(ours, record.gradients[ours])
        assert (gradient - model.get_parameter(other).grad).norm() <= 2e-6 * gradient.norm(), ours
