"""The hybrid model's layout."""

from titan_core.api import (
    Column,
    Computed,
    Constant,
    Mixer,
    ModelDefinition,
    ModelLayout,
    Normal,
    Ref,
    Replicate,
    Row,
    Shard,
    causal_attention,
)
from titan_model_hybrid.config import HybridArgs


def define(args: HybridArgs) -> ModelDefinition:
    def build() -> object:
        from titan_model_hybrid.model import Hybrid

        return Hybrid(args)

    attention = args.n_layers // 2
    return ModelDefinition(
        layout=layout(args),
        build=build,
        num_params=args.num_params,
        flops_per_token=lambda seq_len: (
            6.0 * (args.num_params - args.vocab_size * args.dim) + 12.0 * attention * args.dim * seq_len
        ),
    )


def layout(args: HybridArgs) -> ModelLayout:
    recurrent = [f"blocks.{index}.mixing" for index in range(args.n_layers) if args.is_recurrent(index)]
    attention = [f"blocks.{index}.mixing" for index in range(args.n_layers) if not args.is_recurrent(index)]
    recurrence = Mixer(
        kind="linear_recurrence",
        divided=Ref("titan_model_hybrid.divided:divided") if args.divide_sequences else None,
    )
    return ModelLayout(
        num_blocks=args.n_layers,
        dim=args.dim,
        vocab_size=args.vocab_size,
        max_seq_len=args.max_seq_len,
        embedding=("embedding",),
        blocks="blocks",
        head=("norm", "unembedding"),
        block_costs=tuple(map(float, args.block_params)),
        rules={
            "blocks.*.mixing.output.weight": Row(),
            "blocks.*.mixing.gates.*": Shard(-1),
            "blocks.*.mixing.*": Column(),
            "blocks.*.mlp.up.weight": Column(),
            "blocks.*.mlp.down.weight": Row(),
            "*norm*": Replicate(),
        },
        regions=("blocks.*.mixing", "blocks.*.mlp"),
        mixers={
            **{f"{name}.mixer": recurrence for name in recurrent},
            **{f"{name}.mixer": causal_attention(args.n_heads) for name in attention},
        },
        masks_documents=True,
        parameters={
            "*norm*": Constant(1.0),
            "*.gates.rate": Computed(Ref("titan_model_hybrid.rates:rates"), {"slowest": 0.999, "fastest": 0.9}),
            "*.gates.bias": Constant(0.0),
            "*": Normal(0.05),
        },
    )
