"""The description of a machine. Free of torch.

Rates are what real code reaches for large work, not data sheet peaks: the roofline takes shapes, launches and latencies into
account by itself. Tables and keys with a default may be left out of a file; an estimate lists every value that it used.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Rate = Annotated[float, Field(gt=0.0, le=1e9)]
Microseconds = Annotated[float, Field(ge=0.0, le=1e6)]
GiB = Annotated[float, Field(ge=0.0, le=1e6)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]

MATMUL_TYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
"""Types that a ``[matmul.TYPE]`` table may describe."""
HEADROOM = 0.05
"""Share of a device's memory that should stay free, because estimates err."""


class Table(BaseModel):
    """A table of a machine's file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )


class Matmul(Table):
    """Matrix multiplications of one type."""

    peak_tflops: Rate
    """Dense peak of the data sheet, in TFLOP/s: the reference for MFU."""
    achievable_tflops: Rate
    """Rate of large matmuls of random values at the clocks that the device's power limit allows, in TFLOP/s."""
    tile_rows: Count = 128
    """Rows of the result that one multiprocessor computes at a time. A matmul takes whole tiles, in whole waves."""
    tile_columns: Count = 256
    """Columns of the result that one multiprocessor computes at a time."""
    half_tile: Share = 0.9
    """Share of the rate that tiles of half as many columns reach: they read their factors more often."""
    quarter_tile: Share = 0.75
    """As ``half_tile``, for a quarter of the columns."""
    half_depth: Annotated[float, Field(ge=0.0, le=1e6)] = 128.0
    """Inner dimension at which filling and draining the pipeline of a tile takes as long as its arithmetic."""

    @model_validator(mode="after")
    def _possible(self) -> Matmul:
        if self.achievable_tflops > self.peak_tflops:
            raise ValueError("achievable_tflops is larger than peak_tflops")
        return self


class AttentionRates(Table):
    """A fused attention kernel, for the operations that it needs: half of all under a causal mask."""

    forward_tflops: Rate
    """Rate of the forward pass in bf16, in TFLOP/s."""
    backward_tflops: Rate
    """Rate of the backward pass in bf16, in TFLOP/s. It has 2.5 times the operations of the forward pass."""
    causal: Share = 1.0
    """Share of these rates that is reached under a causal mask, which cuts through some of the tiles."""


class Attention(AttentionRates):
    """The fused attention kernel that Titan prefers on this device (``titan_core.toolkit.device.attention_kernels``)."""

    kernel: Annotated[str, Field(min_length=1, max_length=200)] = "the one that Titan selects"
    """Which one it is: ``"cudnn"`` or ``"flash"``, FlashAttention 2 as torch contains it."""
    flash: AttentionRates | None = None
    """FlashAttention 2, if that is another one: published runs used it, and FlexAttention, which computes document masks, is
    about as fast."""
    half_positions: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Positions of a sequence at which a CPU reaches half of these rates, which are those of long sequences."""


class MemoryRates(Table):
    """The device's own memory, which bounds kernels that compute little."""

    bandwidth_gb_s: Rate
    """Bandwidth of the data sheet, in GB/s."""
    efficiency: Share = 0.85
    """Share of it that pointwise kernels, norms and copies reach."""
    kernel_us: Microseconds = 3.0
    """Least duration of a kernel, with the gap before the next one."""
    functions_g_s: Rate | None = None
    """10^9 elements per second of pointwise functions that consist of many instructions, such as silu, if these and not the
    bandwidth bound them (on a CPU)."""
    fresh_mib: Count | None = None
    """Size of allocations from which on the system provides their memory, and clears it page by page (on a CPU)."""
    fresh_gb_s: Rate | None = None
    """Rate at which it does so, in GB/s."""


class Host(Table):
    """The host, which issues a device's work."""

    computes: bool = False
    """Whether the host is the device (a CPU): it issues an operator after it has computed the one before."""
    operator_us: Microseconds = 8.0
    """Time to issue an operator eagerly. The host is ahead of the device unless kernels are shorter than this."""
    compiled_kernel_us: Microseconds = 3.0
    """Time to issue a kernel of compiled code, or a matmul, attention or collective in it."""
    copy_gb_s: Rate = 25.0
    """Bandwidth between pinned host memory and the device, each way, in GB/s."""
    optimizer_gb_s: Rate = 20.0
    """Host memory bandwidth for a rank's share of an optimizer step on the host, in GB/s."""


class Link(Table):
    """The links between ranks, within a node or across nodes."""

    bandwidth_gb_s: Rate
    """Bus bandwidth that a rank reaches in large collectives, in GB/s each way. Across nodes: of the rank's share of the
    node's network cards."""
    latency_us: Microseconds
    """Time of one hop of a small message."""


class Links(Table):
    """The links between ranks."""

    node: Link
    """Between ranks of a node."""
    network: Link
    """Between ranks of different nodes."""
    start_us: Microseconds = 10.0
    """Time to start a collective, before its first hop."""
    multiprocessors: Annotated[int, Field(ge=0, le=10_000)] = 16
    """Multiprocessors that a running collective keeps from concurrent computation: the number of NCCL's channels."""
    channel_mib: Annotated[float, Field(ge=0.0, le=1e6)] = 9.2
    """Memory of a channel of a communicator: NCCL's buffers have 4 MiB (simple protocol), 4.7 (LL128) and 0.5 (LL)."""


class Allocator(Table):
    """The caching allocator of torch, which an estimate replays."""

    caching: bool = True
    """Whether the device's memory is allocated by it. Otherwise (on a CPU), memory in use is all that counts."""
    expandable_segments: bool = True
    """Whether its segments grow, as Titan sets it; ``false`` for ``PYTORCH_ALLOC_CONF=expandable_segments:False``."""
    handles: Count = 2
    """Threads that compute, each with a handle of cuBLAS: the one of the forward pass, and autograd's."""
    workspace_mib: Annotated[float, Field(ge=0.0, le=1e6)] = 32.0
    """Workspace of a handle of cuBLAS: 32 MiB on Hopper (``getChosenWorkspaceSize`` in torch's ``CublasHandlePool.cpp``)."""


class Machine(Table):
    """A kind of device, its host and its links."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """What the machine is, in words."""
    memory_gib: Annotated[float, Field(gt=0.0, le=1e6)]
    """Memory of a device."""
    multiprocessors: Count = 1
    """Multiprocessors (compute units) of a device, among which the tiles of a matmul are divided."""
    capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")] = "9.0"
    """CUDA compute capability that the simulated device reports, which decides what code runs."""
    ranks_per_node: Count = 8
    """Devices of a node."""
    context_gib: GiB = 0.6
    """Memory of the CUDA context and of loaded kernels, outside of torch's allocator."""
    matmul: dict[str, Matmul]
    """By type. A type without a table runs at the rate of the next wider one that has a table."""
    attention: Attention
    memory: MemoryRates
    host: Host = Host()
    links: Links
    allocator: Allocator = Allocator()

    @field_validator("matmul")
    @classmethod
    def _types(cls, value: dict[str, Matmul]) -> dict[str, Matmul]:
        if unknown := sorted(set(value) - set(MATMUL_TYPES)):
            raise ValueError(f"unknown type {unknown[0]!r}; the types are {', '.join(MATMUL_TYPES)}")
        if not {"fp32", "bf16"} <= set(value):
            raise ValueError("needs at least [matmul.fp32] and [matmul.bf16]")
        return value

    def matmul_of(self, kind: str) -> Matmul:
        """Return the rates of matmuls of type ``kind``, or of the type that this device computes it in."""
        for candidate in (kind, *_INSTEAD.get(kind, ())):
            if candidate in self.matmul:
                return self.matmul[candidate]
        return self.matmul["fp32"]

    def assumptions(self) -> dict[str, Any]:
        """Return every figure by dotted key, as in the file."""
        return dict(_flat("", self.model_dump()))


_INSTEAD = {
    "nvfp4": ("fp8", "bf16"), "mxfp8": ("fp8", "bf16"), "fp8": ("bf16",), "fp16": ("bf16",), "bf16": ("fp16",),
    "tf32": ("fp32",),
}  # fmt: skip


def _flat(prefix: str, table: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _flat(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found
