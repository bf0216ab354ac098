"""Costs of the optimizers and averages of weights, for planning. Free of torch."""

from __future__ import annotations

from titan_core.api import Costs, JobContext, OptimizerCosts
from titan_optim.config import AveragesSection, MuonSection


def of_muon(context: JobContext[MuonSection]) -> OptimizerCosts:
    """Return the costs of Muon, as if it orthogonalised all matrices of blocks: for these one fp32 mean, for others two."""
    return OptimizerCosts(state_bytes=8.0, matrix_state_bytes=4.0, blocks_alike=False)


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
    """Return the costs of AdamW with bfloat16 state."""
    return OptimizerCosts(state_bytes=4.0)
