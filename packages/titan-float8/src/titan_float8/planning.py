"""What planning a job needs to know of low precision. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan_core.api import Costs, JobContext
from titan_float8.config import Float8Section, MXSection


def float8_choices(context: JobContext[Float8Section]) -> Mapping[str, Sequence[Any]]:
    """Return whether to compute in float8. The key changes the numbers, so a plan tries it on request only."""
    return {} if context.config.section(MXSection).enable else {"float8.enable": (False, True)}


def float8_costs(context: JobContext[Float8Section]) -> Costs:
    """Return the type of the matmuls."""
    return Costs(matmul_type="fp8")


def mx_costs(context: JobContext[MXSection]) -> Costs:
    """Return the type of the matmuls."""
    return Costs(matmul_type="mxfp8")
