"""How large a number in a config may be: one named type for each kind of quantity.

A section annotates a field with one of these types and keeps the lower bound, which differs from key to key, in the field::

    interval: Steps = Field(default=500, gt=0)

Each upper bound lies well beyond anything that was ever trained and well below what overflows, exhausts memory or never
ends. A field without one of these types still refuses NaN, infinities and numbers beyond :data:`LARGEST`
(:class:`titan_core.api.section.Section`).
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

LARGEST: Final = 2**63 - 1
"""The largest magnitude of any number in a config: what a signed 64-bit integer holds."""

MOST_STEPS: Final = 10**9
MOST_RANKS: Final = 2**20
MOST_PROCESSES: Final = 512
"""Processes on one machine."""
MOST_LAYERS: Final = 1024
"""The deepest language models have some 130 blocks."""
LONGEST_SECONDS: Final = 30 * 24 * 3600.0

Steps = Annotated[int, Field(le=MOST_STEPS)]
"""Optimizer steps, and periods counted in them."""
Ranks = Annotated[int, Field(le=MOST_RANKS)]
"""Processes, and degrees of parallelism."""
Layers = Annotated[int, Field(le=MOST_LAYERS)]
"""Blocks of a model."""
Width = Annotated[int, Field(le=2**18)]
"""Features of a hidden state or inside a layer; the largest open model of 2024 has 16,384 and 53,248."""
Heads = Annotated[int, Field(le=2**12)]
Vocabulary = Annotated[int, Field(le=2**22)]
"""Tokens in a vocabulary; the largest have some 260,000."""
Tokens = Annotated[int, Field(le=2**27)]
"""Tokens in one sequence."""
LocalSequences = Annotated[int, Field(le=2**16)]
"""Sequences that one rank takes at once."""
GlobalSequences = Annotated[int, Field(le=2**20)]
"""Sequences of one optimizer step, over all ranks."""
Documents = Annotated[int, Field(le=10**7)]
"""Documents held in memory."""
Processes = Annotated[int, Field(le=256)]
"""Worker processes of one rank."""
Count = Annotated[int, Field(le=10**6)]
"""Whatever is kept in memory or in files, one by one."""
FewSteps = Annotated[int, Field(le=1000)]
"""Steps whose data or events are held in memory at once."""
Retries = Annotated[int, Field(le=20)]
WholeSeconds = Annotated[int, Field(le=int(LONGEST_SECONDS))]
Seconds = Annotated[float, Field(le=LONGEST_SECONDS)]
"""A time-out or a period."""
LearningRate = Annotated[float, Field(le=100.0)]
WeightDecay = Annotated[float, Field(le=100.0)]
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
"""What keeps a denominator from 0. In fp32 anything much smaller *is* 0, and 0 / 0 is NaN."""
GradientNorm = Annotated[float, Field(le=1e9)]
Factor = Annotated[float, Field(le=1e6)]
"""What another number is multiplied by, and relative weights."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A part of a whole."""
Wavelength = Annotated[float, Field(ge=1.0, le=1e12)]
"""The base of rotary frequencies."""
