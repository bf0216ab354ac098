"""GPT-2's layout."""

from titan_core.api import Column, Constant, ModelDefinition, ModelLayout, Normal, Replicate, Row, causal_attention
from titan_model_gpt2.config import GPT2Args


def define(args: GPT2Args) -> ModelDefinition:
    def build() -> object:
        from titan_model_gpt2.model import GPT2

        return GPT2(args)

    sizes = {"num_blocks": args.n_layers, "dim": args.dim, "vocab_size": args.vocab_size, "max_seq_len": args.max_seq_len}
    layout = ModelLayout(
        **sizes,
        embedding=("embedding",),
        blocks="blocks",
        head=("norm", "unembedding"),
        rules={
            "blocks.*.attention.[qkv].*": Column(),
            "blocks.*.mlp.up.*": Column(),
            "blocks.*.proj.*": Row(),
            "*norm*": Replicate(),
        },
        regions=("blocks.*.attention", "blocks.*.mlp"),
        mixers={"blocks.*.attention.mixer": causal_attention(args.n_heads)},
        masks_documents=True,
        parameters={
            "*bias": Constant(0.0),
            "*norm*.weight": Constant(1.0),
            "*.proj.weight": Normal(0.02 / (2 * args.n_layers) ** 0.5),
            "*.weight": Normal(0.02),
        },
        tied={"unembedding.weight": "embedding.token.weight"} if args.tie_embeddings else {},
    )
    flops = lambda seq_len: 6.0 * args.num_params + 12.0 * args.n_layers * args.dim * seq_len  # noqa: E731
    return ModelDefinition(layout=layout, build=build, num_params=args.num_params, flops_per_token=flops)
