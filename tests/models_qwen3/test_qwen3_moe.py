"""The mixtures of experts agree with those of transformers: sizes, routing, logits, gradients. The recipe trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pydantic import ValidationError
from torch import Tensor, nn

from titan_core.api import ModelPart
from titan_core.model.layout_check import check_layout
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_models_qwen3.moe_config import FLAVORS, Qwen3MoEArgs
from titan_models_qwen3.moe_formats import hf_config
from titan_models_qwen3.moe_layout import define, layout
from titan_models_qwen3.moe_model import Qwen3MoE, TokenRouter
from titan_testing.jobs import make_job, run_recipe

SMALL = Qwen3MoEArgs(
    dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=24, ffn_dim=96, vocab_size=100, max_seq_len=256, rope_theta=1e4,
    n_experts=6, experts_per_token=2, expert_dim=32, n_dense_layers=1,
)  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "scoring": "sigmoid", "choice_bias": True, "n_groups": 3, "n_chosen_groups": 2, "weight_scale": 2.5,
    "n_shared_experts": 2,
}  # fmt: skip
VARIANTS = {"qwen3": {}, "deepseek": DEEPSEEK, "all with experts": {"n_dense_layers": 0}, "tied": {"tie_embeddings": True}}


@pytest.mark.parametrize(
    ("flavor", "parameters", "active"),
    [("30B-A3B", 30_532_122_624, 3_353_032_704), ("235B-A22B", 235_093_634_560, 22_190_763_520)],
)
def test_published_sizes(flavor: str, parameters: int, active: int) -> None:
    definition = define(FLAVORS[flavor])
    assert (definition.num_params, definition.num_active_params) == (parameters, active)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layout_describes_the_model(variant: str) -> None:
    args = SMALL.model_copy(update=VARIANTS[variant])
    with torch.device("meta"):
        model = Qwen3MoE(args)
    check_layout(model, layout(args), "qwen3_moe")
    assert sum(parameter.numel() for parameter in model.parameters()) == args.num_params
    unused = (args.n_experts - args.experts_per_token) * 3 * args.dim * args.expert_dim
    assert args.num_params - args.num_active_params == (args.n_layers - args.n_dense_layers) * unused


def test_flops_are_those_of_the_active_parameters() -> None:
    args = FLAVORS["30B-A3B"]
    multiplied = args.num_active_params - 151_936 * 2048
    assert args.flops_per_token(4096) == 6 * multiplied + 12 * 48 * (32 * 128) * 4096
    assert sum(args.block_costs(4096)) == pytest.approx(args.flops_per_token(4096) - 6 * 151_936 * 2048, rel=1e-4)


def test_pipelines_know_which_blocks_have_experts() -> None:
    dense, *sparse = layout(SMALL).block_costs
    assert dense - sparse[0] == 6 * (3 * 64 * (96 - 2 * 32) - 6 * 64)
    assert sparse[0] == sparse[1]


def made(args: Qwen3MoEArgs) -> Qwen3MoE:
    """Return a model whose norms are not the identity."""
    model = Qwen3MoE(args)
    materialise(ModelPart(model, layout(args), NextToken()), torch.device("cpu"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.5 * torch.rand_like(parameter))
            elif "layers" in name:
                parameter.mul_(5)  # so that scores differ between positions, and the weights of experts
    return model


def of_library(args: Qwen3MoEArgs) -> Any:
    config = transformers.Qwen3MoeConfig(**{key: value for key, value in hf_config(args).items() if value is not None})
    return transformers.Qwen3MoeForCausalLM._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )  # fmt: skip


NAMES = {
    "tok_embeddings": "model.embed_tokens", "output": "lm_head", "layers": "model.layers", "norm": "model.norm",
    "attention.w": "self_attn.", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "feed_forward.router": "mlp.gate",
    "feed_forward.experts.w2": "mlp.experts.down_proj", "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


def named_there(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the library has them in memory, where gates and ups are joined."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.w1"):
            joined = torch.cat((tensor, tensors[name[:-1] + "3"]), 1)
            found["model." + name.replace("feed_forward.experts.w1", "mlp.experts.gate_up_proj")] = joined
        elif not name.endswith("experts.w3"):
            start = next(ours for ours in ("tok_embeddings", "output", "layers", "norm") if name.startswith(ours))
            theirs = NAMES[start] + name.removeprefix(start)
            inner = next((ours for ours in NAMES if f".{ours}" in name), None)
            if inner is not None:
                theirs = theirs.replace(inner, NAMES[inner])
                if inner == "attention.w":
                    theirs = theirs.replace(".weight", "_proj.weight")
            found[theirs] = tensor
    return found


@pytest.mark.parametrize("change", [{}, {"norm_weights": False}, {"tie_embeddings": True}], ids=["", "not normed", "tied"])
def test_logits_and_gradients_equal_those_of_transformers(change: dict[str, Any]) -> None:
    args = SMALL.model_copy(update=change)
    ours, theirs = made(args), of_library(args)
    missing, unexpected = theirs.load_state_dict(named_there(dict(ours.named_parameters())), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if args.tie_embeddings else [])
    tokens = torch.randint(0, 100, (2, 65))
    routed: list[Tensor] = []
    for layer in theirs.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: routed.append(outputs[2]))
    for block in list(ours.layers.values())[1:]:
        block.feed_forward.router.register_forward_hook(lambda module, inputs, outputs: routed.append(outputs[1]))
    found, expected = ours(tokens[:, :-1]), theirs(tokens[:, :-1]).logits
    assert len(routed) == 4 and torch.equal(routed[0], routed[2]) and torch.equal(routed[1], routed[3])
    assert len(routed[0].unique()) == 6
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = named_there({name: one.grad for name, one in ours.named_parameters() if one.grad is not None})
    named = dict(theirs.named_parameters())
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        reference = named[name].grad
        assert (gradient - reference).norm() <= 1e-4 * reference.norm(), name


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "not normed"])
def test_the_router_chooses_as_that_of_deepseek_v3(normed: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter

    args = SMALL.model_copy(update={**DEEPSEEK, "n_experts": 24, "norm_weights": normed, "experts_per_token": 4})
    config = transformers.DeepseekV3Config(
        hidden_size=64, n_routed_experts=24, num_experts_per_tok=4, n_group=3, topk_group=2, routed_scaling_factor=2.5,
        norm_topk_prob=normed,
    )  # fmt: skip
    ours, theirs = TokenRouter(args), DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.uniform_(-0.5, 0.5)
        ours.weight.copy_(theirs.weight)
        ours.choice.bias.copy_(theirs.e_score_correction_bias)  # type: ignore[union-attr]
    tokens = torch.randn(200, 64)
    weights, chosen, scores = ours(tokens)
    found = theirs(tokens)
    if isinstance(found, torch.Tensor):  # transformers 5.0: its block chooses
        block = DeepseekV3MoE(config)
        block.gate = theirs
        indices, expected = block.route_tokens_to_experts(found)
    else:
        _, expected, indices = found
    order, reference = chosen.argsort(), indices.argsort()
    assert torch.equal(chosen.gather(1, order), indices.gather(1, reference))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, reference))
    torch.testing.assert_close(scores, F.linear(tokens, theirs.weight).sigmoid())  # without the bias
    for gradient, module in ((weights.square().sum(), ours), (expected.square().sum(), theirs)):
        gradient.backward()
        assert module.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


def test_routers_compute_in_fp32_from_bf16() -> None:
    router, x = TokenRouter(SMALL), torch.randn(2, 5, 64, dtype=torch.bfloat16)
    nn.init.normal_(router.weight)
    weights, chosen, scores = router(x)
    assert (weights.dtype, chosen.dtype, scores.dtype) == (torch.float32, torch.int64, torch.float32)
    assert (weights.shape, chosen.shape, scores.shape) == ((10, 2), (10, 2), (10, 6))
    torch.testing.assert_close(scores, F.linear(x.float().flatten(0, 1), router.weight).softmax(-1))


def test_shared_experts_are_added() -> None:
    args = SMALL.model_copy(update={"n_shared_experts": 2})
    feed_forward = made(args).layers["1"].feed_forward
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        both = feed_forward(x)
        shared, feed_forward.shared = feed_forward.shared, None
        assert shared.w1.out_features == 64
        torch.testing.assert_close(both, feed_forward(x) + shared(x))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"experts_per_token": 7}, "experts_per_token 7 exceeds the 6 experts to choose from"),
        ({"n_groups": 3, "experts_per_token": 3}, "experts_per_token 3 exceeds the 2 experts to choose from"),
        ({"n_groups": 4}, "n_groups 4 must divide n_experts 6"),
        ({"n_groups": 6}, "each of n_groups 6 must have two of the n_experts 6, or more"),
        ({"n_chosen_groups": 2}, "n_chosen_groups 2 exceeds n_groups 1"),
        ({"n_dense_layers": 3}, "n_dense_layers 3 must be less than n_layers 3"),
        ({"n_kv_heads": 3}, "n_heads 4 must be a multiple of n_kv_heads 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Qwen3MoEArgs(**{**SMALL.model_dump(), **change})


def test_the_recipe_trains_all_experts(in_tmp: Path) -> None:
    record = run_recipe(
        "qwen3_moe_tiny",
        {"job.device": "cpu", "training.steps": 8, "lr_scheduler.warmup_steps": 2, "training.seq_len": 64},
        weights=True,
    )
    assert record.losses[0] > 5.5 and record.losses[-1] < 0.9 * record.losses[0]
    for name in ("w1", "w2", "w3"):
        assert record.gradients[f"layers.3.feed_forward.experts.{name}"].flatten(1).norm(dim=1).min() > 0


def test_frozen_experts_have_no_gradients_of_the_share_that_a_token_uses() -> None:
    whole, frozen = (make_job("qwen3_moe_tiny", {"training.freeze": freeze}, 1) for freeze in ("[]", '["layers.*"]'))
    attention, router, experts = 128 * 48 * (4 + 2 + 2 + 4), 128 * 8, 3 * 128 * 128 * 2
    assert whole.flops_per_token - frozen.flops_per_token == 2 * 4 * (attention + router + experts)
