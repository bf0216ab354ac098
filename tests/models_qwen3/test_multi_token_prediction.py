"""Multi-token prediction computes DeepSeek-V3's equations 21 to 25 (arXiv 2412.19437): losses, gradients, targets, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_core.api import Batch, Microbatch, ModelLayout, ModelPart, UserError, Vocabulary
from titan_core.api.parallel.microbatch import MetricSums
from titan_core.model.layout_check import check_layout
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_models_qwen3 import formats, layout as dense, moe_formats, moe_layout
from titan_models_qwen3.config import FLAVORS, Qwen3Args
from titan_models_qwen3.model import Qwen3
from titan_models_qwen3.moe_config import FLAVORS as MOE_FLAVORS, Qwen3MoEArgs
from titan_models_qwen3.moe_model import Qwen3MoE
from titan_models_qwen3.mtp import MultiTokenPrediction, with_later_tokens
from titan_testing.jobs import make_job, run_recipe

SIZES: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "ffn_dim": 48, "vocab_size": 50,
    "max_seq_len": 64, "rope_theta": 1e4,
}  # fmt: skip
DENSE = Qwen3Args(**SIZES, n_mtp_layers=2)
MOE = Qwen3MoEArgs(**SIZES, n_mtp_layers=2, n_dense_layers=1, n_experts=4, experts_per_token=2, expert_dim=24)
TIED = DENSE.model_copy(update={"tie_embeddings": True})
MODELS: dict[str, Qwen3Args] = {"dense": DENSE, "tied": TIED, "experts": MOE}
WEIGHT = 0.4


def layout_of(args: Qwen3Args) -> ModelLayout:
    return moe_layout.layout(args) if isinstance(args, Qwen3MoEArgs) else dense.layout(args)


def model_of(args: Qwen3Args) -> Qwen3:
    return Qwen3MoE(args) if isinstance(args, Qwen3MoEArgs) else Qwen3(args)


def made(args: Qwen3Args) -> Qwen3:
    """Return a model whose norms are not the identity."""
    model = model_of(args)
    materialise(ModelPart(model, layout_of(args), NextToken()), torch.device("cpu"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.5 * torch.rand_like(parameter))
            elif "layers" in name:
                parameter.mul_(5)
    return model


def a_batch(documents: tuple[int, ...] = (), weighted: bool = False) -> Batch:
    """Return two sequences of 17 tokens, in documents of these lengths."""
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (2, 18))
    targets = ids[:, 1:].clone()
    batch = Batch(ids[:, :-1], targets, weights=0.5 + torch.rand(2, 17) if weighted else None)
    if not documents:
        return batch
    numbers = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    positions = torch.cat([torch.arange(length) for length in documents])
    targets[:, :-1][:, numbers[1:] != numbers[:-1]] = -100
    return Batch(
        batch.tokens, targets, weights=batch.weights, positions=positions.expand(2, -1), documents=numbers.expand(2, -1)
    )


# -- an independent computation, one document at a time


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """``[heads, seq, width]``, positions from 0."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] / 1e4 ** (torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def feed_forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    if "router.weight" not in w:
        return (F.silu(x @ w["w1.weight"].T) * (x @ w["w3.weight"].T)) @ w["w2.weight"].T
    scores = (x @ w["router.weight"].T).softmax(-1)
    rows = []
    for token, of_token in zip(x, scores, strict=True):
        best, which = of_token.topk(2)
        outputs = [(F.silu(w["experts.w1"][e] @ token) * (w["experts.w3"][e] @ token)) @ w["experts.w2"][e].T for e in which]
        rows.append(sum(share * output for share, output in zip(best / best.sum(), outputs, strict=True)))
    return torch.stack(rows)


def within(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}


def block(w: dict[str, Tensor], x: Tensor) -> Tensor:
    normed = rms(x, w["attention_norm.weight"])
    q, k, v = ((normed @ w[f"attention.w{one}.weight"].T).unflatten(-1, (-1, 12)).transpose(0, 1) for one in "qkv")
    q, k = rotated(rms(q, w["attention.q_norm.weight"])), rotated(rms(k, w["attention.k_norm.weight"]))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = (q @ k.transpose(1, 2) / 12**0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    h = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["attention.wo.weight"].T
    return h + feed_forward(within(w, "feed_forward."), rms(h, w["ffn_norm.weight"]))


def losses_of_document(w: dict[str, Tensor], ids: Tensor, weights: Tensor, depths: int) -> list[Tensor]:
    """Return the summed loss of the next token, then those of each depth. The last of ``ids`` is only a target."""
    if len(ids) < 2:
        return []  # a document of one token
    embedding = w["tok_embeddings.weight"]
    output = w.get("output.weight", embedding)
    tokens, states = ids[:-1], embedding[ids[:-1]]
    for index in range(2):
        states = block(within(w, f"layers.{index}."), states)
    norms, found = [w["norm.weight"], *(w[f"norm.mtp.{depth}.weight"] for depth in range(depths))], []
    for depth in range(depths + 1):
        length = len(tokens) - depth
        if length <= 0:
            break
        if depth:
            own = within(w, f"layers.{1 + depth}.")
            pair = (rms(embedding[tokens[depth:]], own["enorm.weight"]), rms(states[:length], own["hnorm.weight"]))
            states = block(own, torch.cat(pair, -1) @ own["eh_proj.weight"].T)
        likelihood = (rms(states, norms[depth]) @ output.T).log_softmax(-1)
        picked = likelihood.gather(1, ids[depth + 1 :, None])[:, 0]
        found.append(-(picked * weights[depth:]).sum())
    return found


def expected_losses(model: Qwen3, ids: Tensor, weights: Tensor, documents: tuple[int, ...]) -> list[Tensor]:
    """Return the loss of the next token, and of each depth, summed over all documents."""
    w = dict(model.named_parameters())
    totals = [torch.zeros(()) for _ in range(1 + model.depths)]
    for row, of_row in zip(ids, weights, strict=True):
        first = 0
        for length in documents or (17,):
            # All but the last document of a sequence end with a token that is no more than a target.
            count = length + (first + length == 17)
            found = losses_of_document(w, row[first : first + count], of_row[first : first + count - 1], model.depths)
            totals = [total + (found[index] if index < len(found) else 0.0) for index, total in enumerate(totals)]
            first += length
    return totals


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("documents", [(), (7, 2, 1, 7)], ids=["one document", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_equations(name: str, documents: tuple[int, ...], weighted: bool) -> None:
    model, batch = made(MODELS[name]), a_batch(documents, weighted)
    part = ModelPart(model, layout_of(MODELS[name]), MultiTokenPrediction(NextToken(), WEIGHT))
    part.batch_transforms = (lambda one: with_later_tokens(one, model.depths),)
    metrics = MetricSums()
    found = part.forward_loss(Microbatch(batch, step=1, seed=0, metrics=metrics))
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(found, list(model.parameters())), strict=True))

    torch.manual_seed(1)
    ids = torch.randint(0, 50, (2, 18))
    weights = torch.ones(2, 17) if batch.weights is None else batch.weights
    main, *later = expected_losses(model, ids, weights, documents)
    loss = main + WEIGHT * sum(later) / len(later)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0.0)
    squares = torch.zeros(2)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for (path, gradient), expected in zip(gradients.items(), wanted, strict=True):
        difference, norm = (gradient - expected).norm(), expected.norm()
        assert norm > 0 and difference <= 3e-6 * norm, path  # a sum of many, in fp32
        squares += torch.stack((difference, norm)).square()
    assert squares[0].sqrt() <= 1e-6 * squares[1].sqrt()
    main_sum, main_weight = metrics.values["main_loss"]
    assert float(main_sum) == pytest.approx(main.item(), rel=1e-6)
    assert float(main_weight) == pytest.approx(batch.target_weights().sum().item())
    assert float(metrics.values["mtp_loss"][0]) == pytest.approx(sum(later).item(), rel=1e-6)


def test_an_evaluation_has_the_loss_of_the_next_token_and_reports_that_of_the_others() -> None:
    model, batch = made(DENSE), a_batch()
    part = ModelPart(model, layout_of(DENSE), MultiTokenPrediction(NextToken(), WEIGHT))
    part.batch_transforms = (lambda one: with_later_tokens(one, model.depths),)
    metrics = MetricSums()
    with torch.no_grad():
        found = part.forward_loss(Microbatch(batch, step=1, seed=0, metrics=metrics))
        alone = NextToken()(model(batch.tokens), batch, Vocabulary())
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=0.0)
    assert metrics.values["mtp_loss"][1] == 2 * (16 + 15)


def test_targets_end_with_their_document() -> None:
    batch = with_later_tokens(a_batch((3, 2, 12)), 2)
    tokens, targets, weights = (batch.extras[f"mtp_{name}"].tensor[0] for name in ("tokens", "targets", "weights"))
    none = -100
    assert (targets[:6, 0] == none).tolist() == [False, True, True, True, True, False]
    assert (targets[:6, 1] == none).tolist() == [True, True, True, True, True, False]
    assert torch.equal(weights > 0, targets != none)
    plain = a_batch()
    assert torch.equal(targets[5:16, 0], plain.targets[0, 6:17]) and torch.equal(targets[5:15, 1], plain.targets[0, 7:17])
    assert torch.equal(tokens[:16, 0], plain.tokens[0, 1:]) and torch.equal(tokens[:15, 1], plain.tokens[0, 2:])
    assert (targets[16:] == none).all() and (targets[15:, 1] == none).all()
    assert all(extra.sequence for extra in batch.extras.values())


def test_a_target_keeps_its_weight() -> None:
    batch = a_batch(weighted=True)
    assert batch.weights is not None
    weights = with_later_tokens(batch, 1).extras["mtp_weights"].tensor[..., 0]
    assert torch.equal(weights[:, :-1], batch.weights[:, 1:]) and not weights[:, -1].any()


def test_sequences_shorter_than_the_depths_have_no_targets() -> None:
    batch = with_later_tokens(Batch(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)), 3)
    assert batch.extras["mtp_targets"].tensor.tolist() == [[[1, -100, -100], [-100, -100, -100]]]


@pytest.mark.parametrize("name", MODELS)
def test_the_layout_describes_the_model(name: str) -> None:
    args = MODELS[name]
    with torch.device("meta"):
        model = model_of(args)
    check_layout(model, layout_of(args), name)
    assert layout_of(args).states_per_position == 3
    assert sum(parameter.numel() for parameter in model.parameters()) == args.num_params


@pytest.mark.parametrize(
    "flavor", [FLAVORS["8B"], MOE_FLAVORS["30B-A3B"], MOE_FLAVORS["235B-A22B"]], ids=lambda one: str(one.dim)
)
def test_flops_count_the_blocks_and_the_head_once_more(flavor: Qwen3Args) -> None:
    args = flavor.model_copy(update={"n_mtp_layers": 1})
    of_a_block = flavor.block_costs(4096)[-1]
    added = args.flops_per_token(4096) - flavor.flops_per_token(4096)
    assert added == pytest.approx(of_a_block + 6 * (2 * args.dim**2 + args.vocab_size * args.dim), rel=1e-4)
    assert args.block_costs(4096)[-1] == pytest.approx(added, rel=1e-4)
    assert args.num_params - flavor.num_params == pytest.approx(
        (flavor.num_params - 2 * args.vocab_size * args.dim) / flavor.n_layers + 2 * args.dim**2, rel=1e-4
    )


def test_a_model_that_is_not_trained_predicts_the_next_token_only() -> None:
    model, batch = made(DENSE), a_batch()
    later = with_later_tokens(batch, 2).extras["mtp_tokens"].tensor
    with torch.no_grad():
        logits = model(batch.tokens, mtp_tokens=later)
        assert logits.shape == (6, 17, 50)
        model.requires_grad_(False)
        torch.testing.assert_close(model(batch.tokens, mtp_tokens=later), logits[:2], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model(batch.tokens), logits[:2], rtol=1e-5, atol=1e-6)


def written(model: Qwen3, args: Qwen3Args, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their names there."""
    parameters, found = dict(model.named_parameters(remove_duplicate=False)), {}
    declared = moe_formats.hf_tensors(args) if isinstance(args, Qwen3MoEArgs) else formats.hf_tensors(args)
    for tensor in declared:
        if not tensor.copy:
            whole = parameters[tensor.parameter].detach()
            rows = whole.flatten(0, 1).split([count for _, count in tensor.pieces]) if tensor.pieces else [whole]
            found |= dict(zip(tensor.names, (piece.clone() for piece in rows), strict=True))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_tensor_with_a_name_of_deepseek_v3(name: str, tmp_path: Path) -> None:
    args = MODELS[name]
    tensors = written(made(args), args, tmp_path)
    assert sum(tensor.numel() for tensor in tensors.values()) == args.num_params
    for layer in (2, 3):
        parts = {one.removeprefix(f"model.layers.{layer}.") for one in tensors if one.startswith(f"model.layers.{layer}.")}
        own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
        assert own <= parts and {"input_layernorm.weight", "self_attn.q_proj.weight"} <= parts
        assert ("mlp.experts.3.up_proj.weight" in parts) == (name == "experts")
        assert "embed_tokens.weight" not in parts and "shared_head.head.weight" not in parts
    assert tensors["model.layers.2.eh_proj.weight"].shape == (32, 64)
    assert not any(one.startswith("model.layers.4.") for one in tensors)


@pytest.mark.parametrize("form", [formats, moe_formats], ids=["dense", "experts"])
def test_the_config_names_the_number_of_depths(form: Any) -> None:
    args = (FLAVORS if form is formats else MOE_FLAVORS)["debug"]
    assert "num_nextn_predict_layers" not in form.hf_config(args)
    written_config = json.loads(json.dumps(form.hf_config(args.model_copy(update={"n_mtp_layers": 2}))))
    assert written_config["num_nextn_predict_layers"] == 2 and written_config["num_hidden_layers"] == args.n_layers
    assert form.hf_args(written_config).n_mtp_layers == 2
    assert form.hf_args({**written_config, "num_nextn_predict_layers": 0}).n_mtp_layers == 0
    for bad in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match="num_nextn_predict_layers is"):
            form.hf_args({**written_config, "num_nextn_predict_layers": bad})


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"model.args": "{n_mtp_layers = -1}"}, "n_mtp_layers"),
        ({"model.args": "{n_mtp_layers = 1}", "objective.mtp_weight": 0.0}, "mtp_weight"),
        ({"model.args": "{n_mtp_layers = 1}", "objective.mtp_weight": "inf"}, "mtp_weight"),
    ],
)
def test_bad_values_are_refused(overrides: dict[str, object], why: str, in_tmp: Path) -> None:
    with pytest.raises(UserError, match=why):
        make_job("qwen3_debug", overrides)


def test_sequences_without_a_token_so_far_ahead_are_refused(in_tmp: Path) -> None:
    short = {"model.args": "{n_mtp_layers = 4}", "training.seq_len": 4, "job.device": "cpu"}
    with pytest.raises(UserError, match=r"sequences of 4 tokens .* have no token so far ahead"):
        run_recipe("qwen3_debug", short)


def test_the_recipe_trains_both_losses(in_tmp: Path) -> None:
    settings = {
        "job.device": "cpu", "model.args": "{n_layers = 2, n_mtp_layers = 1}", "training.steps": 10,
        "lr_scheduler.warmup_steps": 2, "training.seq_len": 64, "training.global_batch_size": 4,
    }  # fmt: skip
    record = run_recipe("qwen3_debug", settings, weights=True)
    first, last = record.metrics[0], record.metrics[-1]
    assert record.losses[0] == pytest.approx(first["main_loss"] + 0.3 * 63 / 64 * first["mtp_loss"], rel=1e-6)
    assert last["main_loss"] < 0.9 * first["main_loss"] and last["mtp_loss"] < 0.9 * first["mtp_loss"]
    assert record.gradients["layers.2.eh_proj.weight"].norm() > 0
