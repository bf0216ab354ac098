"""The model agrees with that of transformers: sizes, logits, gradients. Its recipe trains without another package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pydantic import ValidationError
from torch import Tensor

from titan_core.api import ModelPart
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_models_qwen3.config import FLAVORS, Qwen3Args
from titan_models_qwen3.formats import hf_config, hf_tensors
from titan_models_qwen3.layout import layout
from titan_models_qwen3.model import Qwen3
from titan_testing.jobs import run_recipe

SMALL = Qwen3Args(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=24, ffn_dim=96, vocab_size=100, max_seq_len=256, rope_theta=1e4
)


PUBLISHED = {
    "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360, "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}  # fmt: skip


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_sizes(flavor: str) -> None:
    assert FLAVORS[flavor].num_params == PUBLISHED[flavor]


def test_flops_are_counted_as_in_the_palm_paper() -> None:
    args = FLAVORS["0.6B"]  # tied; its heads are wider than its hidden states
    assert args.flops_per_token(8192) == 6 * args.num_params + 12 * 28 * (16 * 128) * 8192


def made(args: Qwen3Args) -> Qwen3:
    """Return a model whose norms are not the identity."""
    model = Qwen3(args)
    materialise(ModelPart(model, layout(args), NextToken()), torch.device("cpu"), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.5 * torch.rand_like(parameter))
            elif "layers" in name:
                parameter.mul_(5)  # so that scores differ between positions
    return model


def of_library(args: Qwen3Args) -> Any:
    config = transformers.Qwen3Config(**{key: value for key, value in hf_config(args).items() if value is not None})
    return transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager")


def named_there(args: Qwen3Args, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {one.name: tensors[one.parameter] for one in hf_tensors(args) if one.parameter in tensors and not one.copy}


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_equal_those_of_transformers(tied: bool) -> None:
    args = SMALL.model_copy(update={"tie_embeddings": tied})
    ours, theirs = made(args), of_library(args)
    missing, unexpected = theirs.load_state_dict(named_there(args, dict(ours.named_parameters())), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    assert theirs.config.rope_parameters["rope_theta"] == args.rope_theta
    tokens = torch.randint(0, 100, (2, 65))
    found, expected = ours(tokens[:, :-1]), theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = named_there(args, {name: one.grad for name, one in ours.named_parameters() if one.grad is not None})
    named = dict(theirs.named_parameters())
    assert gradients.keys() == named.keys()
    for name, gradient in gradients.items():
        reference = named[name].grad
        assert (gradient - reference).norm() <= 1e-4 * reference.norm(), name


def test_sizes_that_rotary_positions_and_groups_of_heads_do_not_divide_are_refused() -> None:
    sizes = {"dim": 12, "n_layers": 1, "n_heads": 4, "ffn_dim": 16}
    assert Qwen3Args(**sizes, n_kv_heads=2, head_dim=6).num_params > 0  # 4 heads of 6 features, for 12 hidden ones
    with pytest.raises(ValidationError, match="head_dim 5 must be even: RoPE rotates pairs"):
        Qwen3Args(**sizes, n_kv_heads=2, head_dim=5)
    with pytest.raises(ValidationError, match="n_heads 4 must be a multiple of n_kv_heads 3"):
        Qwen3Args(**sizes, n_kv_heads=3)


def test_the_recipe_trains(in_tmp: Path) -> None:
    record = run_recipe("qwen3_debug", {"job.device": "cpu", "training.steps": 8, "lr_scheduler.warmup_steps": 2})
    assert record.losses[0] > 5.5 and record.losses[-1] < 0.85 * record.losses[0]
