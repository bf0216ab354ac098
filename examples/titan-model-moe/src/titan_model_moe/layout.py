"""The model's layout."""

from collections.abc import Iterator

from titan_core.api import (
    Column,
    Constant,
    Experts,
    JobContext,
    ModelDefinition,
    ModelLayout,
    Normal,
    Problem,
    Replicate,
    Router,
    Row,
    causal_attention,
)
from titan_model_moe.config import ExpertBalanceSection, MoEArgs


def define(args: MoEArgs) -> ModelDefinition:
    def build() -> object:
        from titan_model_moe.model import MoEDecoder

        return MoEDecoder(args)

    return ModelDefinition(
        layout=layout(args),
        build=build,
        num_params=args.num_params,
        num_active_params=args.num_active_params,
        flops_per_token=lambda seq_len: 6.0 * args.num_multiplied_params + 12.0 * args.n_layers * args.dim * seq_len,
    )


def layout(args: MoEArgs) -> ModelLayout:
    return ModelLayout(
        num_blocks=args.n_layers,
        dim=args.dim,
        vocab_size=args.vocab_size,
        max_seq_len=args.max_seq_len,
        embedding=("embedding",),
        blocks="blocks",
        head=("norm", "unembedding"),
        rules={
            "blocks.*.attention.[qkv].weight": Column(),
            "blocks.*.attention.out.weight": Row(),
            "*norm*.weight": Replicate(),
            "blocks.*.feed_forward.router.weight": Replicate(),
            # Under tensor parallelism, each rank routes its own positions through whole experts.
            "blocks.*.feed_forward.experts.*": Experts(),
        },
        regions=("blocks.*.attention",),
        mixers={"blocks.*.attention.mixer": causal_attention(args.n_heads)},
        masks_documents=True,
        routers={"blocks.*.feed_forward.router": Router(experts=args.n_experts, per_token=args.top_k)},
        statistics={"expert_rows": (args.n_layers, args.n_experts)},
        # bf16 weights would send some tokens to other experts.
        exact=("blocks.*.feed_forward.router.weight",),
        parameters={
            "*norm*.weight": Constant(1.0),
            "blocks.*.feed_forward.router.weight": Normal(0.2),
            "*": Normal(0.05),
        },
    )


def check_balance(context: JobContext[ExpertBalanceSection]) -> Iterator[Problem]:
    """Require this package's model: the balance loss works with no other."""
    name = context.job.model_name
    if name != "moe":
        yield context.config.problem("expert_balance.weight", f"model {name!r} is not 'moe'", "set it to 0")
