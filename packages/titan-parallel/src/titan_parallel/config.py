"""Config sections of titan-parallel."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from titan_core.config.section import Section


class FSDPKeys(Section):
    section: ClassVar[str] = "parallelism"

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a block's full parameters are freed after its forward pass and gathered again for backward ("always", least
    memory), or kept ("never", least communication). "default" frees all but the head's, which backward needs at once."""


class TensorParallelKeys(Section):
    section: ClassVar[str] = "parallelism"

    disable_sequence_parallel: bool = False
    """Under tensor parallelism, keep all positions on every rank between layers instead of dividing them."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits on every rank instead of computing the loss on a divided vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallelism's communication with its products (CUDA with symmetric memory, compiled)."""


class ActivationCheckpointSection(Section):
    section: ClassVar[str] = "activation_checkpoint"

    mode: Literal["none", "selective", "full"] = "none"
    """What is computed again for backward instead of being kept: nothing, some of each block, or whole blocks."""
    selective_ac_option: str = "op"
    """For "selective": "op" keeps attention, reduce-scatters and every second matrix product of a block; a number N
    recomputes every N-th block whole."""

    @field_validator("selective_ac_option")
    @classmethod
    def _op_or_number(cls, value: str) -> str:
        if value != "op" and not (value.isdecimal() and int(value) > 0):
            raise ValueError('must be "op" or a whole number of at least 1, as text')
        return value


class CompileSection(Section):
    section: ClassVar[str] = "compile"

    enable: bool = False
    """Compile with torch.compile: each block by itself, which compiles once for all blocks, and the loss."""
    components: list[Literal["model", "loss"]] = Field(default=["model", "loss"])
    """What to compile."""
    backend: str = "inductor"
    """torch.compile's backend; "eager" and "aot_eager" help to find out which part of the compiler is at fault."""
    fullgraph: bool = True
    """Whether a block that cannot be compiled whole is an error; otherwise the rest of it runs eagerly."""
