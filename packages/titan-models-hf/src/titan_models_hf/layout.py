"""The layout of a model of transformers, from its facts. Imports neither torch nor transformers, unless the facts must be
derived first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from titan_core.api import (
    Column,
    Computed,
    Constant,
    Experts,
    InitialValue,
    Loaded,
    Mixer,
    ModelDefinition,
    ModelLayout,
    Normal,
    Ref,
    Replicate,
    Router,
    Row,
    Rule,
    Shard,
    TruncatedNormal,
    Uniform,
    causal_attention,
)
from titan_models_hf.cache import facts_of
from titan_models_hf.config import HFArgs
from titan_models_hf.facts import MIXER, Attention, Facts, Recurrence

if TYPE_CHECKING:
    from torch import Tensor, nn

RULES: Final[Mapping[str, Rule]] = {
    "column": Column(),
    "row": Row(),
    "shard 0": Shard(0),
    "norm": Shard(0, norm=True),
    "experts": Experts(),
    "replicate": Replicate(),
}
VALUES: Final[Mapping[str, Callable[..., InitialValue]]] = {
    "constant": Constant,
    "normal": Normal,
    "truncated normal": TruncatedNormal,
    "uniform": Uniform,
    "loaded": Loaded,
    "computed": lambda program: Computed(Ref("titan_models_hf.programs:run"), {"program": program}),
}


def define(args: HFArgs) -> ModelDefinition:
    """Return the definition of a model of transformers.

    Raises:
        UserError: the library does not know the model, or Titan does not understand it.
    """
    facts = facts_of(args)
    return ModelDefinition(
        layout=layout(args, facts),
        build=partial(_build, args),
        num_params=facts.num_params,
        num_active_params=facts.num_active_params,
        flops_per_token=facts.flops_per_token,
    )


def layout(args: HFArgs, facts: Facts) -> ModelLayout:
    """Return the model's parts, their sharding rules and their initial values."""
    return ModelLayout(
        num_blocks=facts.num_blocks,
        dim=facts.dim,
        vocab_size=facts.vocab_size,
        max_seq_len=facts.max_seq_len,
        embedding=facts.embedding,
        blocks=facts.blocks,
        head=facts.head,
        block_costs=facts.block_flops if len(set(facts.block_flops)) > 1 else (),
        rules={pattern: RULES[name] for pattern, name in facts.rules.items()},
        regions=facts.regions,
        mixers=mixers(facts),
        masks_documents=facts.masks_documents,
        routers={
            name: Router(experts=one.experts, per_token=one.per_token, bias=one.bias) for name, one in facts.routers.items()
        },
        parameters={pattern: VALUES[name](*numbers) for pattern, (name, numbers) in facts.parameters.items()},
        buffers={name: partial(_buffer, args, name) for name in facts.buffers},
        tied=facts.tied,
    )


def mixers(facts: Facts) -> dict[str, Mixer]:
    """Return the layout's description of all modules that mix positions."""
    return {
        **{f"{name}.{MIXER}": mixer(attention) for name, attention in facts.attentions.items()},
        **{f"{name}.{MIXER}": _recurrence(one) for name, one in facts.recurrences.items()},
        **dict.fromkeys(facts.convolutions, _CONVOLUTION),
    }


_CONVOLUTION = Mixer(kind="causal_convolution", divided=Ref("titan_models_hf.recurrent.convolution:divided"))


def _recurrence(one: Recurrence) -> Mixer:
    return Mixer(
        kind="gated_delta_rule" if one.delta else "gated_linear_attention",
        heads=one.heads,
        kv_heads=one.kv_heads,
        divided=Ref("titan_models_hf.recurrent.linear_recurrence:divided"),
    )


def mixer(attention: Attention) -> Mixer:
    """Return the layout's description of an attention module's mixer."""
    return causal_attention(attention.heads, attention.kv_heads, **attention.options)


def _build(args: HFArgs) -> nn.Module:
    from titan_models_hf.model import build

    return build(args)


def _buffer(args: HFArgs, name: str) -> Tensor:
    from titan_models_hf.buffers import buffer

    return buffer(args, name)
