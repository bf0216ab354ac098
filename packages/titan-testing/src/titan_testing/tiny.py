"""The model that most tests train: a decoder with grouped-query attention, rotary positions, RMSNorm and SwiGLU, and with
switches for what some tests are about: options of attention, randomness and state, packed experts. Needs no package but the
core; only :mod:`titan_testing.tiny_model` imports torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from titan_core.api import (
    Column,
    Constant,
    Mixer,
    ModelDefinition,
    ModelLayout,
    Normal,
    Ref,
    Replicate,
    Row,
    Rule,
    Shard,
    causal_attention,
)
from titan_testing.tiny_args import TinyArgs


def define(args: TinyArgs) -> ModelDefinition:
    """Return the definition of a model of this size."""
    looked_up = 0 if args.tie_embeddings else args.vocab_size * args.dim
    return ModelDefinition(
        layout=layout(args),
        build=partial(_build, args),
        num_params=args.num_params,
        flops_per_token=lambda seq_len: 6.0 * (args.num_params - looked_up) + 12.0 * args.n_layers * args.dim * seq_len,
    )


def layout(args: TinyArgs) -> ModelLayout:
    """Return the layout: the modules, how they may be sharded, and the initial values."""
    output = Normal(args.dim**-0.5)
    mean = Mixer(kind="mean", divided=Ref("titan_testing.tiny_model:divided_mean"))
    return ModelLayout(
        num_blocks=args.n_layers,
        dim=args.dim,
        vocab_size=args.vocab_size,
        max_seq_len=args.max_seq_len,
        embedding=("tok_embeddings",),
        blocks="layers",
        head=("norm", "output"),
        rules={
            "layers.*.attention.w[qkv].weight": Column(),
            "layers.*.attention.wo.weight": Row(),
            **_feed_forward_rules(args),
            **({"layers.*.attention.sinks": Shard(0)} if args.sinks else {}),
            **({"layers.*.mean.gain": Replicate()} if args.recurrent else {}),
            "*norm.weight": Replicate(),
        },
        regions=("layers.*.attention",) if args.experts else ("layers.*.attention", "layers.*.feed_forward"),
        mixers={
            f"layers.{index}.attention.mixer": causal_attention(args.n_heads, args.n_kv_heads, **args.attention(index))
            for index in range(args.n_layers)
        }
        | ({"layers.*.mean": mean} if args.recurrent else {}),
        masks_documents=not args.recurrent,
        parameters={
            "*norm.weight": Constant(1.0),
            **({"layers.*.mean.gain": Constant(0.5)} if args.recurrent else {}),
            "tok_embeddings*.weight": output if args.tie_embeddings else Normal(1.0),
            **({} if args.tie_embeddings else {"output.weight": output}),
            "*": Normal(0.2 if args.stateful or args.experts else 0.02),
        },
        buffers=_buffers(args),
        tied={"output.weight": "tok_embeddings.weight"} if args.tie_embeddings else {},
    )


def _feed_forward_rules(args: TinyArgs) -> dict[str, Rule]:
    if args.experts:
        return {"layers.*.feed_forward.*": Replicate()}
    return {"layers.*.feed_forward.w[13].weight": Column(), "layers.*.feed_forward.w2.weight": Row()}


def _buffers(args: TinyArgs) -> dict[str, Any]:
    found: dict[str, Any] = {"angles": partial(_of_model, "angles", args)}
    if args.stateful:
        found |= {f"tok_embeddings.{name}": partial(_of_model, name, args) for name in ("passes", "running")}
    if args.experts:
        found["layers.*.feed_forward.correction"] = partial(_of_model, "correction", args)
    return found


def _build(args: TinyArgs) -> Any:
    from titan_testing.tiny_model import TinyModel

    return TinyModel(args)


def _of_model(name: str, args: TinyArgs) -> Any:
    from titan_testing import tiny_model

    return getattr(tiny_model, name)(args)
