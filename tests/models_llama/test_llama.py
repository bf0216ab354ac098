"""The model agrees with other implementations of Llama: sizes, logits, rotary scaling, initial values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import Tensor

from titan_core.api import ModelPart
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_models_llama.config import FLAVORS, LlamaArgs, RopeScaling
from titan_models_llama.layout import layout
from titan_models_llama.model import Llama

PUBLISHED = {"1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496, "405B": 405_853_388_800}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_sizes(flavor: str) -> None:
    assert FLAVORS[flavor].num_params == PUBLISHED[flavor]


def test_flops_are_counted_as_in_the_palm_paper() -> None:
    args = FLAVORS["8B"]
    multiplied = args.num_params - args.vocab_size * args.dim
    assert args.flops_per_token(8192) == 6 * multiplied + 12 * 32 * 4096 * 8192


def part(model: Llama, args: LlamaArgs) -> ModelPart:
    return ModelPart(model, layout(args), NextToken())


def to_transformers(name: str, weight: Tensor, args: LlamaArgs) -> tuple[str, Tensor]:
    """Convert a name and weight to Hugging Face's format, where RoPE pairs features i and i + half instead of neighbours."""
    renamed = (
        ("tok_embeddings", "model.embed_tokens"), ("layers.", "model.layers."), ("attention.wq", "self_attn.q_proj"),
        ("attention.wk", "self_attn.k_proj"), ("attention.wv", "self_attn.v_proj"), ("attention.wo", "self_attn.o_proj"),
        ("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w2", "mlp.down_proj"), ("feed_forward.w3", "mlp.up_proj"),
        ("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("output", "lm_head"),
    )  # fmt: skip
    if name.startswith("norm."):
        return f"model.{name}", weight
    if name.endswith(("wq.weight", "wk.weight")):
        heads = weight.shape[0] // args.head_dim
        weight = weight.view(heads, args.head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
    for ours, theirs in renamed:
        name = name.replace(ours, theirs)
    return name, weight


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=8.0, original_max_seq_len=64)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_transformers(scaling: RopeScaling | None, tied: bool) -> None:
    args = LlamaArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=100, max_seq_len=256, rope_theta=10_000.0,
        rope_scaling=scaling, tie_embeddings=tied,
    )  # fmt: skip
    ours = Llama(args)
    materialise(part(ours, args), torch.device("cpu"), seed=0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if scaling is not None:
        rope = {
            "rope_type": "llama3", "rope_theta": args.rope_theta, "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=args.norm_eps, rope_parameters=rope,
        tie_word_embeddings=tied,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    weights = dict(to_transformers(name, weight, args) for name, weight in ours.named_parameters())
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if tied else set())
    tokens = torch.randint(0, 100, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_explicit_positions() -> None:
    args = FLAVORS["debug"].model_copy(update={"n_layers": 1})
    model = Llama(args)
    materialise(part(model, args), torch.device("cpu"), seed=0)
    tokens = torch.randint(0, 258, (2, 16))
    positions = torch.arange(16).expand(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens, positions=positions))
        moved = model(tokens, positions=positions + 7)  # rotary positions depend only on distances
        torch.testing.assert_close(model(tokens), moved, rtol=1e-4, atol=1e-4)
        spread = model(tokens, positions=positions * 3)
        assert not torch.allclose(model(tokens), spread, atol=1e-3)
        model.rope = model.rope[::3]
        torch.testing.assert_close(model(tokens), spread)


def test_initial_values() -> None:
    args = FLAVORS["debug"]
    model = Llama(args)
    materialise(part(model, args), torch.device("cpu"), seed=0)
    layers = model.layers
    model.requires_grad_(False)
    assert model.tok_embeddings.weight.std() == pytest.approx(1.0, rel=0.02)
    assert model.output.weight.std() == pytest.approx(args.dim**-0.5, rel=0.05)
    for index in (0, 5):
        deep = 0.02 / math.sqrt(2 * (index + 1))
        assert layers[str(index)].attention.wo.weight.std() == pytest.approx(deep, rel=0.05)
        assert layers[str(index)].feed_forward.w2.weight.std() == pytest.approx(deep, rel=0.05)
        assert layers[str(index)].feed_forward.w3.weight.std() == pytest.approx(deep, rel=0.05)
        for plain in (layers[str(index)].attention.wq, layers[str(index)].feed_forward.w1):
            assert plain.weight.std() == pytest.approx(0.02, rel=0.05)
        assert layers[str(index)].ffn_norm.weight.eq(1).all()


def test_tied_weights_stay_tied_when_materialised() -> None:
    args = FLAVORS["debug"].model_copy(update={"tie_embeddings": True})
    with torch.device("meta"):
        model = Llama(args)
    materialise(part(model, args), torch.device("cpu"), seed=0)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.output.weight.detach().std() == pytest.approx(args.dim**-0.5, rel=0.05)  # as an output layer starts


def test_heads_must_have_pairs_of_features() -> None:
    sizes = {"n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 16}
    assert LlamaArgs(dim=8, **sizes).head_dim == 2
    with pytest.raises(ValidationError, match="dim 12 must be a multiple of 2 x n_heads 4: RoPE rotates pairs"):
        LlamaArgs(dim=12, **sizes)
