"""The layout of decoders built of :mod:`titan_nn.decoder`, which transforms read instead of the model class. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from titan_core.api import (
    Column,
    Constant,
    InitialValue,
    ModelLayout,
    Normal,
    Replicate,
    Row,
    TruncatedNormal,
    causal_attention,
)

if TYPE_CHECKING:
    from torch import Tensor


class DecoderArgs(Protocol):
    """The sizes that the arguments of a model state."""

    @property
    def dim(self) -> int:
        """Width of the hidden states."""

    @property
    def n_layers(self) -> int:
        """Number of blocks."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""

    @property
    def n_kv_heads(self) -> int:
        """Number of key and value heads, a divisor of ``n_heads``."""

    @property
    def head_dim(self) -> int:
        """Width of a head, even."""

    @property
    def ffn_dim(self) -> int:
        """Width inside the feed-forward layer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""

    @property
    def max_seq_len(self) -> int:
        """Longest context, in tokens."""

    @property
    def norm_eps(self) -> float:
        """Added to the mean square in RMSNorm."""

    @property
    def tie_embeddings(self) -> bool:
        """Whether the output layer shares the embedding's weight."""


def decoder_layout(args: DecoderArgs, rope: Callable[[], Tensor]) -> ModelLayout:
    """Return the model's parts, their sharding rules and their initial values.

    Args:
        args: sizes of the model.
        rope: computes the table of :func:`~titan_nn.rotary.rotary_table`.
    """
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
            "layers.*.feed_forward.w[13].weight": Column(),
            "layers.*.feed_forward.w2.weight": Row(),
            "*norm.weight": Replicate(),
        },
        regions=("layers.*.attention", "layers.*.feed_forward"),
        mixers={"layers.*.attention.mixer": causal_attention(args.n_heads, args.n_kv_heads)},
        masks_documents=True,
        parameters=initial_values(args),
        buffers={"rope": rope},
        tied={"output.weight": "tok_embeddings.weight"} if args.tie_embeddings else {},
    )


def initial_values(args: DecoderArgs, feed_forward: str = "feed_forward.w[23].weight") -> dict[str, InitialValue]:
    """Return TorchTitan's initial values: weights that write to the residual stream start smaller in deeper layers.

    Args:
        args: sizes of the model.
        feed_forward: pattern of such weights in the feed-forward layer of a block.
    """
    values: dict[str, InitialValue] = {"*norm.weight": Constant(1.0)}
    for index in range(args.n_layers):
        deep = TruncatedNormal(std=0.02 / (2 * (index + 1)) ** 0.5)
        values[f"layers.{index}.attention.wo.weight"] = deep
        values[f"layers.{index}.{feed_forward}"] = deep
    values["layers.*.weight"] = TruncatedNormal(std=0.02)
    # A tied weight starts like an output layer. With an embedding's standard deviation of 1, logits would be too large.
    output = TruncatedNormal(std=args.dim**-0.5)
    values["tok_embeddings.weight"] = output if args.tie_embeddings else Normal(std=1.0)
    if not args.tie_embeddings:
        values["output.weight"] = output
    return values
