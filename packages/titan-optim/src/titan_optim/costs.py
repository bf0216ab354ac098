"""Costs of the optimizers and averages of weights, for planning. Free of torch."""

from __future__ import annotations

from functools import partial

from titan_core.api import Costs, JobContext, OptimizerCosts
from titan_optim.config import AveragesSection, MuonSection


def of_muon(context: JobContext[MuonSection]) -> OptimizerCosts:
    """Return the costs of Muon, as if it orthogonalised all matrices of blocks: for these one fp32 mean, for others two."""
    section = context.section
    width = 2.0 if section.dtype == "bfloat16" else 4.0
    return OptimizerCosts(
        state_bytes=8.0,
        traffic=28.0,
        matrix_state_bytes=4.0,
        matrix_flops=partial(iteration_flops, steps=section.steps),
        matrix_type="bf16" if section.dtype == "bfloat16" else "fp32",
        exchanged_bytes=2 * width,  # shards of momentum, and of updates
        workspace_bytes=section.buffer_mib * 2**20 * 4 * width / 4,  # a matrix, its next value and two products
        blocks_alike=False,
    )


def of_averages(context: JobContext[AveragesSection]) -> Costs:
    """Return the costs of averages in fp32 of weights in fp32. On the host, they are written to the device, taken there, and
    read again."""
    offload = context.section.enable_cpu_offload
    return Costs(
        after_update_traffic=20.0 if offload else 12.0,
        after_update_copies=8.0 if offload else 0.0,
        after_update_every=context.section.freq,
    )


def of_adamw_bf16(context: JobContext[None]) -> OptimizerCosts:
    """Return the costs of AdamW with bfloat16 state, computed operator by operator in fp32."""
    return OptimizerCosts(state_bytes=4.0, traffic=600.0)


def iteration_flops(rows: int, columns: int, steps: int) -> float:
    """Return the floating-point operations of ``steps`` Newton-Schulz iterations of a matrix ``[rows, columns]``."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)
