"""The config keys of titan-experts."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from titan_core.api import ALL_KEYS, Factor, Ranks, Section

VIEW: Final = "ep"
"""Name of the view of the mesh whose ranks divide the experts."""


class ExpertParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    expert_parallel_degree: Ranks = Field(default=1, gt=0)
    """Number of ranks that the experts of each block are divided over. These are ranks of data, context and tensor
    parallelism: the degree must divide data_parallel_shard_degree x context_parallel_degree x tensor_parallel_degree,
    without the last one if disable_sequence_parallel is true."""
    expert_parallel_dispatch: Literal["alltoall", "device"] = "alltoall"
    """How rows reach their experts. "alltoall": exactly as many as there are, for which the host waits once in each block.
    "device": buffers of fixed size and no wait, so that the device never idles, but more bytes are sent and held."""
    expert_parallel_capacity: Factor | None = Field(default=None, gt=0.0)
    """With dispatch "device": rows that each rank can send to each other rank, as a multiple of an even share. If a rank has
    more, the loss of the step is not a number, and training.on_nan decides; nothing is dropped. Default: what suffices for
    any choice of experts, at most the degree."""


class ExpertsSection(Section):
    section: ClassVar[str] = "experts"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    balance: Literal["none", "sequence", "global", "bias"] = "none"
    """What keeps the experts of a block equally busy. "sequence": a loss for each sequence (arXiv 2412.19437, equations 17
    to 20). "global": a loss that compares with the rows of the experts in the whole batch of the previous step. "bias": no
    loss; after each step, a bias of the choice rises for experts with fewer rows than the mean, and falls for others (arXiv
    2408.15664)."""
    balance_weight: Factor = Field(default=0.001, gt=0.0)
    """Factor of the loss "sequence" or "global", which is 1 in each block if all experts are equally busy."""
    bias_rate: Factor = Field(default=0.001, gt=0.0)
    """How much "bias" changes the bias of an expert in a step."""
    z_loss_weight: Factor = Field(default=0.0, ge=0.0)
    """Factor of a loss that keeps the logits of routers small: in each block, the mean over positions of the square of their
    log-sum-exp (arXiv 2202.08906, equation 5). 0.0: no such loss."""
    metrics: bool = True
    """Count the rows of the experts of a model with routers, and report how busy they are."""
    force_balanced: bool = False
    """Choose the experts by turns, whatever the scores. For measurements of speed only: the model cannot learn to choose."""
