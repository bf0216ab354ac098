"""A layout that contradicts its model is refused when the model is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from titan_core.api import Column, Constant, Experts, Replicate, Router, Row, Rule, Shard, UserError, causal_attention
from titan_core.model.layout_check import check_layout
from titan_testing.tiny import TinyArgs, layout
from titan_testing.tiny_model import TinyModel

ARGS = TinyArgs()
LAYOUT = layout(ARGS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": ("wte",)}, "embedding names 'wte', which is not a module"),
        ({"head": ()}, "head is empty"),
        ({"blocks": "norm"}, "'norm', which is a RMSNorm, not a ModuleList or ModuleDict"),
        ({"num_blocks": 3}, "num_blocks is 3, but 'layers' has 6"),
        ({"regions": ("layers.*.mlp",)}, r"regions pattern 'layers.\*.mlp' matches no module"),
        ({"sums": ("layers.*.mlp",)}, r"sums pattern 'layers.\*.mlp' matches no module"),
        ({"mixers": {"mixer": causal_attention(1)}}, "mixers pattern 'mixer' matches no module"),
        ({"rules": {"layers.*.qkv": Column()}}, r"rules pattern 'layers.\*.qkv' matches no parameter"),
        ({"rules": {"layers.*.feed_foward.w1.weight": Column()}}, r"did you mean 'layers.\*.feed_forward.w1.weight'\?"),
        ({"rules": {"norm.weight": Row()}}, r"Row\(\) for 'norm.weight', but its module is a RMSNorm, not an nn.Linear"),
        ({"rules": {"norm.weight": Shard(1)}}, r"Shard\(dim=1, norm=False\) for 'norm.weight', which has 1 dimension"),
        ({"rules": {"norm.weight": Experts(-2)}}, r"Experts\(dim=-2, .* for 'norm.weight', which has 1 dimension"),
        (
            {"rules": {"*.w1.weight": Shard(0, norm=True)}},
            r"norm=True\) for 'layers.0.feed_forward.w1.weight': all parameters of a norm have one dimension",
        ),
        ({"rules": {"*.w1.weight": Experts(1, Shard(-1))}}, "which divides one dimension twice"),
        ({"exact": ("*.router.weight",)}, r"layout of model 'tiny': exact pattern '\*.router.weight' matches no parameter"),
        ({"routers": {"*.router": Router(experts=2, per_token=1)}}, r"routers pattern '\*.router' matches no module"),
        (
            {
                "rules": {"layers.0.feed_forward.w1.weight": Experts(), **LAYOUT.rules},
                "routers": {"layers.*.feed_forward": Router(experts=7, per_token=1)},
            },
            r"routers let 'layers.0.feed_forward' choose from 7 experts, but its block has \d+",
        ),
        ({"block_costs": (1.0,)}, "block_costs has 1 numbers, but num_blocks is 6"),
        ({"block_costs": (1.0,) * 5 + (0.0,)}, r"block_costs must be positive and finite, but are \[1.0, .*0.0\]"),
        ({"parameters": {"layers.*": Constant(0.0)}}, "parameter 'output.weight' has no initial value"),
        ({"parameters": {"output.*": Constant(0.0)}}, r"parameter 'layers.\*.feed_forward.w1.weight' has no initial value"),
        ({"parameters": {"*": Constant(0.0), "x": Constant(0.0)}}, "parameters pattern 'x' matches no parameter"),
        ({"buffers": {}}, "buffer 'angles' has no function that computes it"),
        ({"tied": {"output.weight": "tok_embeddings.weight"}}, "but they are not one parameter in the model"),
    ],
)
def test_contradictions(changes: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = TinyModel(ARGS)
    check_layout(model, LAYOUT, "tiny")
    with pytest.raises(UserError, match=message):
        check_layout(model, replace(LAYOUT, **changes), "tiny")


def test_blocks_must_be_numbered() -> None:
    with torch.device("meta"):
        model = TinyModel(ARGS)
    model.layers = torch.nn.ModuleDict({f"b{name}": block for name, block in model.layers.items()})
    with pytest.raises(UserError, match="the blocks in 'layers' are named 'b0' to 'b5', not '0' to '5'"):
        check_layout(model, LAYOUT, "tiny")


def test_shared_parameters_must_be_declared_and_are_not_exact() -> None:
    args = ARGS.model_copy(update={"tie_embeddings": True})
    with torch.device("meta"):
        model = TinyModel(args)
    check_layout(model, layout(args), "tiny")
    with pytest.raises(UserError, match=r"'output\.weight' is shared with another"):
        check_layout(model, replace(layout(args), tied={}), "tiny")
    with pytest.raises(UserError, match=r"exact contains 'tok_embeddings.weight', which is tied to another parameter"):
        check_layout(model, replace(layout(args), exact=("tok_embeddings.weight",)), "tiny")


def test_a_module_computes_in_fp32_or_not() -> None:
    class Owner(TinyModel):
        def __init__(self) -> None:
            super().__init__(ARGS)
            self.norm.scale = torch.nn.Parameter(torch.ones(()))

    with torch.device("meta"):
        model = Owner()
    check_layout(model, replace(LAYOUT, exact=("norm.*", "layers.0.*")), "tiny")
    with pytest.raises(UserError, match=r"exact contains 'norm.scale' but not 'norm.weight' of the same module"):
        check_layout(model, replace(LAYOUT, exact=("norm.scale",)), "tiny")


def test_a_layers_weight_and_bias_have_one_rule() -> None:
    class Biased(TinyModel):
        def __init__(self) -> None:
            super().__init__(ARGS)
            self.layers["0"].feed_forward.w2 = torch.nn.Linear(384, 128)  # type: ignore[union-attr, assignment]

    with torch.device("meta"):
        model = Biased()
    values = {"*bias": Constant(0.0), **LAYOUT.parameters}
    both: dict[str, Rule] = {"*.w2.bias": Row(), **LAYOUT.rules}
    check_layout(model, replace(LAYOUT, parameters=values, rules=both), "tiny")
    rules: dict[str, Rule] = {"*.w2.bias": Replicate(), **LAYOUT.rules}
    with pytest.raises(UserError, match=r"Row\(\) for 'layers\.0\.feed_forward\.w2\.weight', but weight and bias"):
        check_layout(model, replace(LAYOUT, parameters=values, rules=rules), "tiny")


@pytest.mark.parametrize("chosen", [0, 5])
def test_a_router_chooses_from_its_experts(chosen: int) -> None:
    with pytest.raises(ValueError, match=f"a router of 4 experts cannot choose {chosen}"):
        Router(experts=4, per_token=chosen)
