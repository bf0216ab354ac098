"""Config sections of titan-parallel."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator

from titan_core.api import ALL_KEYS, AnyPath, Layers, MeshView, PositiveInt, Ranks, Section, Share
from titan_core.api.config.numbers import MOST_LAYERS


class FSDPKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether to free a block's full parameters after its forward pass and gather them again for backward ("always", least
    memory), or to keep them ("never", least communication). "default" keeps only the head's, which backward needs first;
    under pipeline parallelism it keeps all."""
    fsdp_group_mib: float = Field(default=25.0, ge=0.0, le=2.0**20)
    """Gather neighbouring blocks together as long as their full parameters take at most this many MiB, and the whole model
    if it does not take more. Each gather and reduction costs the host about 0.3 ms, more than the computation of a small
    block. By default, the last of several blocks gathered together are kept for backward. The blocks of large models take
    more, so each is gathered on its own; so are compiled blocks, and with 0 all."""


class TensorParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    disable_sequence_parallel: bool = False
    """Under tensor parallelism, keep all positions on every rank between layers instead of sharding them."""
    tensor_parallel_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """With sequence parallelism, whether to free the gathered input of attention and feed-forward after their forward pass
    and gather it again for backward, while backward computes ("always", least memory), or to keep it ("never", least
    communication). "default" gathers it again where blocks do not recompute, because recomputation gathers it anyway.
    Compiled blocks keep what the compiler selects."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits on every rank instead of computing the loss on a sharded vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's collectives with its matmuls. Needs CUDA with symmetric memory, and compile.enable."""


class ContextParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    context_parallel_heads_degree: Ranks = Field(default=1, gt=0)
    """Ranks of context_parallel_degree that trade heads for positions around each attention: each then attends with its
    share of the heads to the positions of all of them. It must divide context_parallel_degree and the heads of a rank. Ring
    attention divides the rest of the degree; if the two degrees are equal, attention sees whole sequences."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How ring attention exchanges keys and values: gathered at once ("allgather"), or passed from rank to rank
    ("alltoall"), which takes less memory. With document masks they are always gathered."""


HEADS: Final = MeshView("cp_heads", "parallelism.context_parallel_heads_degree", borrows=("cp",), shards_parameters=False)
"""The ranks that trade heads for positions: neighbours of the dimension ``cp``. Its remainder are the ranks of a ring."""


class PipelineKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which stages run forward and backward. GPipe and 1F1B need one stage per rank, ZBVZeroBubble and DualPipeV
    two; the others take any number."""
    pipeline_parallel_schedule_csv: AnyPath | None = None
    """CSV file with a schedule of your own, in torch's format: one row per rank, cells such as 0F3 (stage, then F, B, I or
    W, then microbatch). Replaces pipeline_parallel_schedule."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences per pipeline microbatch; must divide training.local_batch_size. All microbatches of an optimizer step pass
    through the pipeline in one run of the schedule."""
    pipeline_parallel_split_points: list[str] = Field(default_factory=list)
    """First module of the second and of each later stage, e.g. ["layers.8", "layers.16"]. Empty: make the stages as even as
    possible."""
    pipeline_parallel_layers_per_stage: Layers | None = Field(default=None, gt=0)
    """Work per stage, in blocks; determines the number of stages. Default: the number of stages that the schedule needs, or
    two per rank if it takes any number."""
    pipeline_parallel_first_stage_less_layers: Layers | None = Field(default=None, ge=0)
    """Work of the embedding, in blocks, for evening out the stages. Default: half of the head's."""
    pipeline_parallel_last_stage_less_layers: Layers | None = Field(default=None, ge=0)
    """Work of the head, in blocks. Default: by its floating-point operations."""


class ActivationCheckpointSection(Section):
    section: ClassVar[str] = "activation_checkpoint"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """What to recompute in backward instead of keeping: nothing, part of each block, whole blocks, or whatever the compiler
    selects within a memory budget."""
    selective_ac_option: str = "op"
    """For "selective": "op" keeps the results of attention, of the collectives of tensor and expert parallelism, of the
    choice of experts and of every second matmul of a block, and whatever plugins choose; a number N recomputes every N-th
    block entirely."""

    memory_budget: Share = 0.5
    """For "memory_budget": share of a block's activations that may be kept, from 0 (as "full") to 1 (as "none")."""

    @field_validator("selective_ac_option")
    @classmethod
    def _op_or_number(cls, value: str) -> str:
        if value != "op" and not (value.isascii() and value.isdigit() and len(value) < 8 and 0 < int(value) <= MOST_LAYERS):
            raise ValueError(f'must be "op" or a whole number from 1 to {MOST_LAYERS}, in quotes')
        return value


class ActivationOffloadKeys(Section):
    section: ClassVar[str] = "activation_checkpoint"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    offload_share: Share = 0.0
    """Share of the blocks whose activations are copied to pinned host memory after their forward pass, and fetched back
    while backward computes the block after them: those that `mode` keeps, and the input of blocks that recompute. With 1,
    all blocks but the last of the model, or of a pipeline stage, in which backward begins."""


class CompileSection(Section):
    section: ClassVar[str] = "compile"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Compile each block and the loss with torch.compile. Blocks of a kind share one compilation."""
    components: list[Literal["model", "loss"]] = Field(default=["model", "loss"])
    """Parts to compile."""
    backend: str = "inductor"
    """Backend of torch.compile. "eager" and "aot_eager" help to locate a fault in the compiler."""
    fullgraph: bool | None = None
    """Whether a graph break in a block is an error. Otherwise the code at the break runs eagerly. Default: an error, unless
    modules of the model count (statistics) or add losses, or data parallelism gathers modules within a block (experts, and
    parameters that compute in fp32), which interrupts compiled code."""
    cache: bool = True
    """Keep the compiler's results in the run's directory (compile_cache), so that a restarted run does not compile again.
    Only for the backend "inductor"."""

    @property
    def compiles_blocks(self) -> bool:
        """Whether the blocks of the model are compiled."""
        return self.enable and "model" in self.components


class CudaGraphKeys(Section):
    section: ClassVar[str] = "training"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    disable_cuda_graphs: bool = True
    """Let the host launch each kernel of a step. `false` records forward and backward pass of a step as a CUDA graph and
    launches that, which frees small and fast steps from waiting for the host. TorchTitan's default is `false`; here it is
    `true`, because no GPU has measured it yet."""
