"""TinyGPT's layout."""

from titan_core.api import Column, Constant, ModelDefinition, ModelLayout, Normal, Replicate, Row, causal_attention
from titan_model_tinygpt.config import TinyGPTArgs


def define(args: TinyGPTArgs) -> ModelDefinition:
    def build() -> object:
        from titan_model_tinygpt.model import TinyGPT

        return TinyGPT(args)

    return ModelDefinition(
        layout=layout(args),
        build=build,
        num_params=args.num_params,
        flops_per_token=lambda seq_len: 6.0 * args.num_multiplied_params + 12.0 * args.n_layers * args.dim * seq_len,
    )


def layout(args: TinyGPTArgs) -> ModelLayout:
    return ModelLayout(
        num_blocks=args.n_layers,
        dim=args.dim,
        vocab_size=args.vocab_size,
        max_seq_len=args.max_seq_len,
        embedding=("embedding",),
        blocks="blocks",
        head=("norm", "unembedding"),
        rules={
            "blocks.*.attention.[qkv].*": Column(),
            "blocks.*.attention.proj.*": Row(),
            "blocks.*.mlp.up.*": Column(),
            "blocks.*.mlp.down.*": Row(),
            "*norm*": Replicate(),
        },
        regions=("blocks.*.attention", "blocks.*.mlp"),
        mixers={"blocks.*.attention.mixer": causal_attention(args.n_heads)},
        masks_documents=True,
        parameters={
            "*bias": Constant(0.0),
            "*norm*.weight": Constant(1.0),
            "embedding.*": Normal(0.02),
            "*.weight": Normal(0.02),
        },
    )
