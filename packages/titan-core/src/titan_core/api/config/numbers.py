"""Upper bounds of numbers in a config: one named type per kind of quantity.

A section annotates a field with one of these types. The lower bound differs from key to key and stays in the field::

    interval: Steps = Field(default=500, gt=0)

Each upper bound is far above any value ever used for training, and far below values that overflow, exhaust memory or never
finish. A field without one of these types still refuses NaN, infinities and numbers beyond :data:`LARGEST`
(:class:`titan_core.api.Section`).
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

LARGEST: Final = 2**63 - 1
"""Largest magnitude of any number in a config: the maximum of a signed 64-bit integer."""

MOST_STEPS: Final = 10**9
MOST_RANKS: Final = 2**20
MOST_PROCESSES: Final = 512
"""Number of processes on one machine."""
MOST_LAYERS: Final = 1024
"""The deepest language models have about 130 blocks."""
LONGEST_SECONDS: Final = 30 * 24 * 3600.0

Steps = Annotated[int, Field(le=MOST_STEPS)]
"""Number of optimizer steps, or a period in steps."""
Ranks = Annotated[int, Field(le=MOST_RANKS)]
"""Number of ranks, or degree of parallelism."""
Layers = Annotated[int, Field(le=MOST_LAYERS)]
"""Number of blocks in a model."""
Width = Annotated[int, Field(le=2**18)]
"""Number of features of a hidden state or layer; the largest open model of 2024 has 16,384 and 53,248."""
Heads = Annotated[int, Field(le=2**12)]
VocabularySize = Annotated[int, Field(le=2**22)]
"""Number of tokens in a vocabulary; the largest have about 260,000."""
Tokens = Annotated[int, Field(le=2**27)]
"""Number of tokens in one sequence."""
LocalSequences = Annotated[int, Field(le=2**16)]
"""Number of sequences in one rank's forward pass."""
GlobalSequences = Annotated[int, Field(le=2**20)]
"""Number of sequences per optimizer step, over all ranks."""
RecordBytes = Annotated[int, Field(ge=2**10, le=2**40)]
"""Bytes of one record of a dataset."""
Documents = Annotated[int, Field(le=10**7)]
"""Number of documents held in memory."""
Processes = Annotated[int, Field(le=256)]
"""Number of worker processes of one rank."""
Count = Annotated[int, Field(le=10**6)]
"""Number of items kept in memory or in files."""
FewSteps = Annotated[int, Field(le=1000)]
"""Number of steps whose data or events are held in memory at once."""
Retries = Annotated[int, Field(le=20)]
WholeSeconds = Annotated[int, Field(le=int(LONGEST_SECONDS))]
Seconds = Annotated[float, Field(le=LONGEST_SECONDS)]
"""A timeout or a period."""
LearningRate = Annotated[float, Field(le=100.0)]
WeightDecay = Annotated[float, Field(le=100.0)]
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
"""Term that keeps a denominator from being 0. In fp32, much smaller values *are* 0, and 0 / 0 is NaN."""
GradientNorm = Annotated[float, Field(le=1e9)]
Factor = Annotated[float, Field(le=1e6)]
"""A factor on another number, or a relative weight."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A fraction of a whole."""
Wavelength = Annotated[float, Field(ge=1.0, le=1e12)]
"""Base of rotary frequencies."""
