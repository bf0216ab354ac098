"""Classifies operators by their names. Free of torch."""

from __future__ import annotations


def is_varlen(name: str) -> bool:
    """Whether an operator is variable-length attention (``torch.nn.attention.varlen``)."""
    return "_varlen_attn" in name


def is_grouped(name: str) -> bool:
    """Whether an operator is a grouped product (:mod:`titan_simulate.engine.grouped`)."""
    return "_grouped_mm" in name
