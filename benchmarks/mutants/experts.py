"""Mistakes in expert parallelism."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

DISPATCH, JOBS = "tests/experts/test_dispatch.py", "tests/integration/test_expert_parallel.py"
SENDING, DIVIDING, CHECK, FSDP = "experts/dispatch.py", "experts/divide.py", "experts/check.py", "parallel/fsdp.py"

MUTANTS = (
    Mutant("experts-arrive-by-rank", SENDING, "experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)", "experts = torch.arange(arriving.numel(), device=rows.device)", (DISPATCH,)),
    Mutant("experts-outputs-not-returned-in-order", SENDING, "outputs = move(compute(move(arrived, order, inverse(order)), arriving.sum(0)), inverse(order), order)", "outputs = compute(move(arrived, order, inverse(order)), arriving.sum(0))", (DISPATCH,)),
    Mutant("experts-tail-sent", SENDING, "exchange_rows(rows[: sum(sent)], received", "exchange_rows(rows, received", (DISPATCH,)),
    Mutant("experts-starts-inclusive", SENDING, "starts = sent.cumsum(0) - sent", "starts = sent.cumsum(0)", (DISPATCH,)),
    Mutant("experts-empty-slots-first", SENDING, "right=True)", "right=False)", (DISPATCH,)),
    Mutant("experts-dropped-silently", SENDING, ".masked_fill(overflows, torch.nan)", "", (DISPATCH,)),
    Mutant("experts-counts-beyond-the-capacity", SENDING, "ends.clamp(max=limit)", "ends.clamp(max=2**40)", (JOBS,)),
    Mutant("experts-gradient-of-the-wrong-rows", SENDING, "return _taken(gradients[0], back), None, None", "return _taken(gradients[0], back.flip(0)), None, None", (DISPATCH,)),
    Mutant("experts-no-row-is-the-first", SENDING, "torch.where((order >= 0)[:, None], rows[order.clamp(min=0)], 0)", "rows[order.clamp(min=0)]", (DISPATCH,)),
    Mutant("experts-capacity-of-a-rank", DIVIDING, "(keys.expert_parallel_capacity or ranks) / ranks", "(keys.expert_parallel_capacity or 1.0) / ranks / 16", (JOBS,)),
    Mutant("experts-capacity-ignored", CHECK, 'context.section.expert_parallel_capacity is not None and', "False and", (JOBS,)),
    Mutant("experts-next-block-gathered-late", FSDP, "block.set_modules_to_forward_prefetch([*inner, *units[index + 1 : index + 2]])", "block.set_modules_to_forward_prefetch(inner)", (JOBS,)),
    Mutant("experts-shards-uneven", FSDP, "return next((Shard(dim) for dim", "return next((None for dim", (JOBS,)),
)  # fmt: skip
