"""What Titan knows of a model of transformers, as plain data. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict

MIXER: Final = "titan_mixer"
"""The attribute of an attention module that holds its mixer."""


class Attention(BaseModel):
    """What an attention module computes, according to the arguments that it passes to the attention function."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int
    kv_heads: int
    key_width: int
    """Width of a query or key head."""
    value_width: int
    window: int | None = None
    """Number of positions that a query sees, its own included."""
    softcap: float | None = None
    scale: float | None = None
    """Factor of the scores, if it is not ``key_width ** -0.5``."""
    sinks: bool = False
    documents: bool = False
    """Whether the model's ``forward`` passes the ids of documents to it."""

    @property
    def options(self) -> dict[str, Any]:
        """How it differs from plain causal attention, as arguments of :class:`~titan_core.api.CausalAttention`."""
        given = {"window": self.window, "softcap": self.softcap, "scale": self.scale, "sinks": self.sinks}
        return {name: value for name, value in given.items() if value is not None and value is not False}


class Recurrence(BaseModel):
    """What the mixer of a recurrent module computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heads: int
    """Heads with a state of their own."""
    kv_heads: int
    """Number of heads that tensor parallelism must divide too; a divisor of ``heads``."""
    key_width: int
    value_width: int
    delta: bool
    """Whether it is the delta rule, and not gated linear attention."""


class Routing(BaseModel):
    """What a router computes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: int
    per_token: int
    scores: str
    """Name of the function of its logits to which the weights are proportional: "softmax" or "sigmoid"."""
    bias: str | None
    """Name, within the router, of the buffer that is added to the scores for the choice only; ``None``: it has none."""


class Facts(BaseModel):
    """A model's parts, sizes and initial values. Patterns are those of :class:`~titan_core.api.ModelLayout`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_blocks: int
    dim: int
    vocab_size: int
    max_seq_len: int
    embedding: tuple[str, ...]
    blocks: str
    head: tuple[str, ...]
    rules: dict[str, str]
    """Pattern of parameter names -> name of a rule (:data:`titan_models_hf.layout.RULES`)."""
    regions: tuple[str, ...]
    attentions: dict[str, Attention]
    """Name of an attention module -> what it computes."""
    recurrences: dict[str, Recurrence]
    """Name of a recurrent module -> what it computes."""
    convolutions: tuple[str, ...]
    """Modules that convolve positions."""
    experts: tuple[str, ...]
    """Modules of experts that compute from rows sorted by expert."""
    routers: dict[str, Routing]
    """Name of a router -> what it computes; empty if that is unknown of one."""
    results: dict[str, int]
    """Name of a module that hidden states pass through and that returns a tuple, of which only the first item is not
    ``None`` -> number of items."""
    masks_documents: bool
    eager: bool
    """Whether the model computes its attention itself, with masks of the library's eager implementation."""
    parameters: dict[str, tuple[str, tuple[float | str, ...]]]
    """Pattern of parameter names -> name of an initial value (:data:`titan_models_hf.layout.VALUES`), its arguments."""
    buffers: tuple[str, ...]
    tied: dict[str, str]
    num_params: int
    num_active_params: int | None
    """Number of parameters that a token uses; ``None``: all."""
    block_flops: tuple[float, ...]
    """Floating-point operations per token of each block, forward and backward, without the attention scores."""
    other_flops: float
    """Those of the head."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of forward and backward per token.

        6 per parameter of a matmul that a token uses, and 6 x heads x (key width + value width) x context for attention,
        without subtracting the half that the causal mask hides (PaLM paper, arXiv 2204.02311, appendix B). The context is at
        most the attention's window.
        """
        scores = sum(
            6.0 * one.heads * (one.key_width + one.value_width) * min(seq_len, one.window or seq_len)
            for one in self.attentions.values()
        )
        # Three passes, of which each updates and reads a state; the delta rule reads it once more.
        states = sum(
            6.0 * one.heads * one.key_width * one.value_width * (3 if one.delta else 2) for one in self.recurrences.values()
        )
        return sum(self.block_flops) + self.other_flops + scores + states
