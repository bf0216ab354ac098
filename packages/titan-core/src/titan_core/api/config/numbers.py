"""Types of numbers in a config, with their bounds.

A section annotates a field with one of these types::

    interval: PositiveInt = 500

The upper bounds are far above any value ever used for training, and below values that overflow. A field whose value takes
memory or time at once, such as a number of processes, has a bound of its own. A field without any of these types still
refuses NaN, infinities and numbers beyond :data:`LARGEST` (:class:`titan_core.api.Section`).
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

LARGEST: Final = 2**63 - 1
"""Largest magnitude of any number in a config: the maximum of a signed 64-bit integer."""

LARGEST_FLOAT: Final = 1e11
MOST_STEPS: Final = 10**9
MOST_RANKS: Final = 2**20
MOST_PROCESSES: Final = 512
"""Number of processes on one machine."""
MOST_LAYERS: Final = 1024
"""The deepest language models have about 130 blocks."""
LONGEST_SECONDS: Final = 30 * 24 * 3600.0

PositiveInt = Annotated[int, Field(gt=0, le=MOST_STEPS)]
"""Number of steps, tokens, ..., from 1 to a billion."""
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST_STEPS)]
"""Number of steps, tokens, ..., from 0 to a billion."""
PositiveFloat = Annotated[float, Field(gt=0.0, le=LARGEST_FLOAT)]
"""A learning rate, a factor, ..., above 0 and up to 1e11."""
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=LARGEST_FLOAT)]
"""A weight or a factor, from 0 to 1e11."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
"""A fraction of a whole, from 0 to 1."""
Epsilon = Annotated[float, Field(ge=1e-30, le=1.0)]
"""Term that keeps a denominator from being 0. In fp32, much smaller values *are* 0, and 0 / 0 is NaN."""
Ranks = Annotated[int, Field(le=MOST_RANKS)]
"""Number of ranks, or degree of parallelism, up to 2**20. The field adds the lower bound, which some degrees have at -1."""
Layers = Annotated[int, Field(le=MOST_LAYERS)]
"""Number of blocks in a model, each of which is built, up to 1024. The field adds the lower bound."""
Size = Annotated[int, Field(gt=0, le=2**22)]
"""Number of features, heads, experts or vocabulary entries of a model, which has tensors of that size: from 1 to 2**22."""
