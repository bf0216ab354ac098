"""Operators of a step, as plain values. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

Action = tuple[str, int, int]
"""Of a pipeline's schedule: what (``F``: forward; ``B``: whole backward; ``I``, ``W``: gradients of inputs, of weights), the
stage, the microbatch."""
ACTIONS = ("F", "B", "I", "W")
BLOCKS, ALL = "blocks", "all"
"""What of a stage: its blocks, or all that it computes."""


class Kind(StrEnum):
    """What limits an operator."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    """Anything that its memory traffic limits: pointwise operators, norms, reductions, copies."""
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    HOST_COPY = "copy to or from the host"
    HOST = "computation on the host"
    HOST_WAIT = "reading from the device"
    """The host issues nothing further until this ends."""
    WAIT = "wait"
    """Takes no time of its own."""


class Data(NamedTuple):
    """A tensor that an operator reads or writes."""

    storage: int
    """Identifies the storage; numbers are not used again."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """An operator on the device, or one that the device waits for."""

    kind: Kind
    name: str
    phase: str
    module: str
    stream: str
    after: tuple[int, ...]
    """Positions in the trace of what it waits for, on other streams."""
    reads: tuple[Data, ...] = ()
    writes: tuple[Data, ...] = ()
    launches: int = 1
    flops: int = 0
    """Operations that it needs: half of all for attention under a causal mask."""
    causal: bool = False
    """Whether it is attention under a causal mask."""
    type: str = "bf16"
    """Of the factors of a matmul."""
    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Batch, rows, inner dimension and columns of a matmul."""
    ranks: tuple[int, ...] = ()
    """The group of a collective; the other rank of a send or receive."""
    group: str = ""
    bytes: int = 0
    """The larger of input and output of a collective; the bytes sent or received."""
    times: float = 1.0
    """For how many of its like, one after the other, it stands."""
    hidden_seconds: float = 0.0
    """Of a collective that runs piece by piece beside its matmul: seconds that its matmul hides."""
    permutes: bool = False
    """Whether each rank of an exchange sends to one other, as a ring does that passes tensors on."""
    compiled: bool = False
    """Whether compiled code issues it, which fuses pointwise operators with their neighbours."""
    graphed: bool = False
    """Whether a CUDA graph has it, which the host launches as a whole."""
    action: Action | None = None
    """What of a pipeline's schedule it belongs to."""
    recomputed: bool = False
    """Whether a backward pass repeats it because its result was not kept."""
    unit: str = ""
    """The block that its module is in, or what stands beside blocks."""

    @property
    def traffic(self) -> int:
        """Bytes read and written."""
        return sum(one.bytes for one in self.reads) + sum(one.bytes for one in self.writes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by position: dataclasses with slots take five times as long, and a trace has ten thousands of these."""
        return Work, _values(self)


_values = attrgetter(*(one.name for one in fields(Work)))


@dataclass
class Interval:
    """When an operator runs, in seconds since the step began."""

    start: float
    end: float
