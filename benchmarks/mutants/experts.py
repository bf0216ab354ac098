"""Mistakes in expert parallelism."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

DISPATCH, JOBS = "tests/experts/test_dispatch.py", "tests/integration/test_expert_parallel.py"
BALANCED = "tests/integration/test_expert_balance.py"
BESIDE = "tests/integration/test_qwen3_moe.py::test_shared_experts_compute_while_rows_are_on_their_way"
BALANCE = "experts/balance.py"
WHOLE = "tests/integration/test_hf_routers.py::test_the_z_loss_and_its_gradients_are_those_of_the_formula[deepseek_v3, tp2 whole]"
LOSSES = "tests/experts/test_router_losses.py"
MESHES = "tests/integration/test_third_party_meshes.py"
VIEWED = "tests/parallel/test_region_collectives.py::test_gradients_of_parameters_that_a_view_has_divided_among_the_ranks_are_not_summed"
REGION = MESHES + "::test_impossible_divisions_of_experts_are_refused[a region]"
MOVED = "nn/experts.py"
SENDING, DIVIDING, CHECK, FSDP = "experts/dispatch.py", "experts/divide.py", "experts/config.py", "parallel/fsdp.py"
TRIAL = "experts/check_model.py"

MUTANTS = (
    Mutant("experts-arrive-by-rank", SENDING, "experts = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)", "experts = torch.arange(arriving.numel(), device=rows.device)", (DISPATCH,)),
    Mutant("experts-outputs-not-returned-in-order", SENDING, "outputs = move_rows(compute(move_rows(arrived, order, back), arriving.sum(0)), back, order)", "outputs = compute(move_rows(arrived, order, back), arriving.sum(0))", (DISPATCH,)),
    Mutant("experts-tail-sent", SENDING, "exchange_rows(rows[: sum(sent)], received", "exchange_rows(rows, received", (DISPATCH,)),
    Mutant("experts-wait-before-the-shared-ones", "experts/dispatch.py", "    if beside is not None:\n        beside()\n    arrived: Tensor = _End.apply(ticket, arriving, received, sent, group)\n", "    arrived: Tensor = _End.apply(ticket, arriving, received, sent, group)\n    if beside is not None:\n        beside()\n", (DISPATCH,)),
    Mutant("experts-gradients-waited-for-at-once", "experts/dispatch.py", "return start_all_to_all(gradient.contiguous(), ctx.sent, ctx.received, ctx.group), None", "return wait(start_all_to_all(gradient.contiguous(), ctx.sent, ctx.received, ctx.group)), None", (DISPATCH,)),
    Mutant("experts-shared-ones-after-all", DIVIDING, "results: tuple[Tensor, Tensor] = experts(rows, counts, other)", "results: tuple[Tensor, Tensor] = experts(rows, counts), other()", (BESIDE,)),
    Mutant("experts-starts-inclusive", SENDING, "starts = sent.cumsum(0) - sent", "starts = sent.cumsum(0)", (DISPATCH,)),
    Mutant("experts-empty-slots-first", SENDING, "right=True)", "right=False)", (DISPATCH,)),
    Mutant("experts-dropped-silently", SENDING, ".masked_fill(overflows, torch.nan)", "", (DISPATCH,)),
    Mutant("experts-counts-beyond-the-capacity", SENDING, "ends.clamp(max=limit)", "ends.clamp(max=2**40)", (JOBS,)),
    Mutant("experts-gradient-of-the-wrong-rows", MOVED, "return _taken(gradients[0], back, ctx.partial)", "return _taken(gradients[0], back.flip(0), ctx.partial)", (DISPATCH,)),
    Mutant("experts-no-row-is-the-first", MOVED, "torch.where((order >= 0)[:, None], rows[order.clamp(min=0)], 0)", "rows[order.clamp(min=0)]", (DISPATCH,)),
    Mutant("experts-capacity-of-a-rank", "experts/config.py", "(keys.expert_parallel_capacity or ranks) / ranks", "(keys.expert_parallel_capacity or 1.0) / ranks / 16", ("tests/experts/test_planning.py",)),
    Mutant("experts-capacity-ignored", CHECK, 'context.section.expert_parallel_capacity is not None and', "False and", (JOBS,)),
    Mutant("experts-summed-over-tensor-parallelism", "parallel/partial_gradients.py", " and self._is_replicated(parameter)", "", (VIEWED,)),
    Mutant("experts-divided-twice", CHECK, "if shared and inside:", "if False:", ("tests/experts/test_check.py",)),
    Mutant("experts-of-a-region-counted-twice", "experts/check_model.py", "if lent and _is_within(", "if False and _is_within(", (REGION,)),
    Mutant("experts-next-block-gathered-late", FSDP, "block.set_modules_to_forward_prefetch([*inner, *units[index + 1 : index + 2]])", "block.set_modules_to_forward_prefetch(inner)", (JOBS,)),
    Mutant("experts-tried-without-rows-of-none", TRIAL, "torch.cat([*padded, unused])", "torch.cat(padded)", (MESHES,)),
    Mutant("experts-shards-uneven", FSDP, "return next((Shard(dim) for dim", "return next((None for dim", (JOBS,)),
    Mutant("experts-shares-of-a-rank", BALANCE, "dist.all_reduce(rows, group=mesh.get_group())", "pass", (BALANCED,)),
    Mutant("experts-loss-of-raw-scores", BALANCE, "affinities = affinities / affinities.sum(-1, keepdim=True)", "affinities = affinities * 2", (BALANCED,)),
    Mutant("experts-rows-of-the-first-choice", BALANCE, "for which in range(chosen.shape[-1])]", "for which in range(1)]", (BALANCED,)),
    Mutant("experts-rows-not-kept", BALANCE, "self._rows += taken * (found - self._rows)", "pass", (BALANCED,)),
    Mutant("experts-rows-not-saved", BALANCE, 'return {"experts.rows": self._rows}', "return {}", (BALANCED,)),
    Mutant("experts-rows-copied", BALANCE, "router.previous = self._rows[router.block]", "router.previous = self._rows[router.block].clone()", (BALANCED,)),
    Mutant("experts-counted-by-all-ranks", BALANCE, "return positions * ranks < self._seq_len", "return True", (BALANCED,)),
    Mutant("experts-z-loss-of-a-share", BALANCE, "logits.logsumexp(-1).square().sum()", "logits.logsumexp(-1).square().mean()", (LOSSES,)),
    Mutant("experts-z-loss-without-a-gradient", BALANCE, "logits.logsumexp(-1)", "logits.detach().logsumexp(-1)", (LOSSES,)),
    Mutant("experts-z-loss-divided", BALANCE, "add_auxiliary_loss(logits, Z_LOSS, loss, divided=divided)", "add_auxiliary_loss(logits, Z_LOSS, loss, divided=True)", (WHOLE,)),
    Mutant("experts-z-loss-in-vain", "experts/check_routers.py", "if trial.same(lost):", "if False:", (LOSSES,)),
    Mutant("experts-bias-of-another-name", "experts/check_routers.py", '.get(name or "")', '.get("choice.bias")', (LOSSES,)),
    Mutant("experts-bias-of-the-busy-rises", BALANCE, "torch.sign(rows.sum() - rows * rows.shape[0])", "torch.sign(rows * rows.shape[0] - rows.sum())", (LOSSES,)),
    Mutant("experts-no-bias-accepted", "experts/check_routers.py", "any(router.bias is None for router", "any(False for router", (LOSSES,)),
    Mutant("experts-unequal-at-first", BALANCE, "1.0 / rows.shape[0])", "0.0)", (BALANCED,)),
)  # fmt: skip
