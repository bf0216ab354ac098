"""Results of a calibration. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measured:
    """One measured figure."""

    what: str
    value: float
    unit: str
    spread: float
    """Interquartile range of the rounds, relative to the median."""


@dataclass(frozen=True)
class MatmulPoint:
    """A matmul ``[m, k] @ [k, n]`` that was measured."""

    m: int
    n: int
    k: int
    seconds: float
    spread: float

    @property
    def tflops(self) -> float:
        """Its rate, in TFLOP/s."""
        return 2 * self.m * self.n * self.k / self.seconds / 1e12


@dataclass(frozen=True)
class CollectivePoint:
    """A collective that was measured. ``bytes`` is the size of the larger of its input and output on a rank."""

    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``send``."""
    ranks: int
    bytes: int
    seconds: float
    spread: float

    @property
    def hops(self) -> int:
        """Messages that follow each other in a ring."""
        return {"all_reduce": 2 * (self.ranks - 1), "send": 1}.get(self.kind, self.ranks - 1)

    @property
    def bus_bytes(self) -> float:
        """Bytes that a rank sends in a ring."""
        return self.bytes * self.hops / (1 if self.kind == "send" else self.ranks)


@dataclass(frozen=True)
class AttentionPoint:
    """Causal attention that was measured, in TFLOP/s of the operations that the mask leaves."""

    positions: int
    forward: Measured
    backward: Measured


@dataclass(frozen=True)
class FreshMemory:
    """Allocations that the system serves, and clears page by page."""

    least_mib: int
    """Size from which on allocations are fresh."""
    rate: Measured


@dataclass(frozen=True)
class Compute:
    """Rates of one device and of the host."""

    matmuls: dict[str, tuple[MatmulPoint, ...]]
    """By type."""
    attention: tuple[AttentionPoint, ...]
    """By positions, ascending."""
    bandwidth: Measured
    """Reading and writing memory in the simplest pointwise operator."""
    mix: Measured
    """The same in the operators of a block."""
    operator: Measured
    """Time of the host for an operator, in µs. On a CPU this includes the least time of its kernel."""
    host_bandwidth: Measured
    """Of an optimizer on the host."""
    kernel: Measured | None
    """Least duration of a kernel, in µs; ``None`` on a CPU."""
    copy: Measured | None
    """Between the host and the device; ``None`` on a CPU."""
    pointwise: Measured | None
    """Elements per second of functions such as silu; ``None`` on a GPU, where the bandwidth bounds them."""
    fresh: FreshMemory | None
    """``None`` on a GPU, and on a CPU that has none up to the largest size that was measured."""


@dataclass(frozen=True)
class Calibration:
    """The figures of a machine."""

    device: str
    is_cpu: bool
    memory_gib: float
    multiprocessors: int
    capability: str | None
    threads: int
    """Threads of a rank on the host."""
    ranks: int
    """Ranks that measured together."""
    ranks_per_node: int
    compute: Compute
    node: tuple[CollectivePoint, ...] = ()
    network: tuple[CollectivePoint, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
