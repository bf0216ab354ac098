"""Costs of the core's optimizers, for planning. Free of torch."""

from __future__ import annotations

from titan_core.api import JobContext, OptimizerCosts, OptimizerSection


def of_adam(context: JobContext[OptimizerSection]) -> OptimizerCosts:
    """Return the costs of Adam and AdamW: two means in fp32."""
    return OptimizerCosts(state_bytes=8.0)
