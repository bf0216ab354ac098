"""Config sections of titan-parallel."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from titan_core.api.numbers import MOST_LAYERS, Layers, LocalSequences, Share
from titan_core.api.paths import AnyPath
from titan_core.api.section import ALL_KEYS, Section


class FSDPKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a block's full parameters are freed after its forward pass and gathered again for backward ("always", least
    memory), or kept ("never", least communication). "default" frees all but the head's, which backward needs at once, and
    under pipeline parallelism none."""


class TensorParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    disable_sequence_parallel: bool = False
    """Under tensor parallelism, keep all positions on every rank between layers instead of dividing them."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits on every rank instead of computing the loss on a divided vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's communication with its products (CUDA with symmetric memory, compiled)."""


class ContextParallelKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values travel in torch's ring attention (CUDA): gathered once, or from rank to rank, which takes less
    memory. Elsewhere they are always gathered."""


class PipelineKeys(Section):
    section: ClassVar[str] = "parallelism"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    pipeline_parallel_schedule: Literal[
        "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order in which stages run forward and backward. GPipe and 1F1B have one stage a rank, ZBVZeroBubble and DualPipeV two,
    the others two or more."""
    pipeline_parallel_schedule_csv: AnyPath | None = None
    """A schedule of your own instead, as torch writes them: a row a rank, cells like 0F3 (stage, F B I or W, microbatch)."""
    pipeline_parallel_microbatch_size: LocalSequences = Field(default=1, gt=0)
    """Sequences in a pipeline microbatch; divides training.local_batch_size. All microbatches of an optimizer step pass
    through the pipeline in one go."""
    pipeline_parallel_split_points: list[str] = Field(default_factory=list)
    """Modules with which the second and each later stage begin, e.g. ["layers.8", "layers.16"]. Empty: cut where the stages
    come out most even."""
    pipeline_parallel_layers_per_stage: Layers | None = Field(default=None, gt=0)
    """How many blocks' worth of work a stage should have, which decides the number of stages. Default: as few stages as the
    schedule allows, two a rank where it is free."""
    pipeline_parallel_first_stage_less_layers: Layers | None = Field(default=None, ge=0)
    """How many blocks the embedding counts as when stages are evened out. Default: half of what the head does."""
    pipeline_parallel_last_stage_less_layers: Layers | None = Field(default=None, ge=0)
    """How many blocks the head counts as. Default: by its floating-point operations."""


class ActivationCheckpointSection(Section):
    section: ClassVar[str] = "activation_checkpoint"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """What is computed again for backward instead of being kept: nothing, some of each block, whole blocks, or what the
    compiler thinks best within a budget."""
    selective_ac_option: str = "op"
    """For "selective": "op" keeps attention, reduce-scatters and every second matrix product of a block; a number N
    recomputes every N-th block whole."""

    memory_budget: Share = 0.5
    """For "memory_budget": the share of a block's activations that may be kept, 0 as "full" keeps, 1 as "none" does."""

    @field_validator("selective_ac_option")
    @classmethod
    def _op_or_number(cls, value: str) -> str:
        if value != "op" and not (value.isascii() and value.isdigit() and len(value) < 8 and 0 < int(value) <= MOST_LAYERS):
            raise ValueError(f'must be "op" or a whole number from 1 to {MOST_LAYERS}, as text')
        return value


class CompileSection(Section):
    section: ClassVar[str] = "compile"
    may_change: ClassVar[tuple[str, ...]] = ALL_KEYS

    enable: bool = False
    """Compile with torch.compile: each block by itself, which compiles once for all blocks, and the loss."""
    components: list[Literal["model", "loss"]] = Field(default=["model", "loss"])
    """What to compile."""
    backend: str = "inductor"
    """torch.compile's backend; "eager" and "aot_eager" help to find out which part of the compiler is at fault."""
    fullgraph: bool = True
    """Whether a block that cannot be compiled whole is an error; otherwise the rest of it runs eagerly."""
