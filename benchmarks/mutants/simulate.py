"""Mistakes in estimates and plans."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

HELD, COMPUTED, EXCHANGED, EXPERTS, ROOFLINE, STAGES, ALLOCATOR, RESERVED = (
    "tests/simulate/test_plan_memory.py",
    "tests/simulate/test_plan_compute.py",
    "tests/simulate/test_plan_collectives.py",
    "tests/simulate/test_plan_experts.py",
    "tests/simulate/test_roofline.py",
    "tests/simulate/test_pipeline.py",
    "tests/simulate/test_allocator.py",
    "tests/simulate/test_reserved.py",
)
GUESS, GROUPS = "simulate/plan/arithmetic.py", "simulate/plan/groups.py"
KINDS, SHARE = "simulate/plan/unit_kinds.py", "simulate/plan/rank_share.py"
MEMORY, SECONDS = "simulate/plan/rank_memory.py", "simulate/plan/rank_seconds.py"
COLLECTIVES = "simulate/plan/rank_collectives.py"
TIMES, NEED = "simulate/estimate/pipeline.py", "simulate/estimate/reserved.py"

MUTANTS = (
    Mutant("planned-without-stages", "simulate/cli/plan_result.py", "} if config.stages else {}", "} if False else {}", ("tests/integration/test_plan.py",)),
    Mutant("knee-where-a-doubling-saves-less-than-half", "simulate/cli/plan_table.py", "KNEE: Final = 0.4", "KNEE: Final = 0.5", ("tests/simulate/test_plan_table.py",)),
    Mutant("knee-beyond-an-unfinished-row", "simulate/cli/plan_table.py", "row.plan and row.plan.winner, doubled.plan and doubled.plan.winner", "row.best, doubled.best", ("tests/simulate/test_plan_table.py",)),
    Mutant("days-of-all-gpus-together", "simulate/cli/run_length.py", "return cls(steps, hours / 24, hours * gpus,", "return cls(steps, hours / 24 * gpus, hours * gpus,", ("tests/simulate/test_plan_table.py",)),
    Mutant("experts-sent-over-all-cards-of-a-node", GROUPS, "far = (self.ranks - self.together) / self.ranks * size / self.hop", "far = (self.ranks - self.together) / self.ranks * size / self.bandwidth", (EXPERTS,)),
    Mutant("experts-all-equally-busy", SHARE, "self.imbalance = imbalance if divides else 1.0", "self.imbalance = 1.0", (EXPERTS,)),
    Mutant("experts-of-full-tiles", KINDS, "padded = max(rates.tile_rows / rows, 1 + rates.tile_rows / (2 * rows))", "padded = 1.0", (EXPERTS,)),
    Mutant("experts-whose-counts-nobody-waits-for", SECONDS, "return passes * rank.job.host_waits * each * 1e-6", "return 0.0", (EXPERTS,)),
    Mutant("buffers-without-empty-places", SHARE, "(self.job.exchanged_rows - 1) * unit.of_experts", "0.0", (EXPERTS,)),
    Mutant("a-host-that-issues-while-it-waits", "simulate/estimate/timeline.py", "missing[position] += 1", "pass", (ROOFLINE,)),
    Mutant("groups-gather-their-own-share-too", GROUPS, "size * (self.ranks - 1) / self.ranks / self.bandwidth", "size / self.bandwidth", (EXCHANGED,)),
    Mutant("calls-without-latency", GROUPS, "/ self.ranks / self.bandwidth + calls * self.latency", "/ self.ranks / self.bandwidth", (EXCHANGED,)),
    Mutant("state-of-weights-and-gradients", MEMORY, "held * (8 + state)", "held * state", (HELD,)),
    Mutant("state-offloaded-in-vain", MEMORY, "if rank.job.offloads:\n        return 0.0", "if False:\n        return 0.0", (COMPUTED,)),
    Mutant("state-of-matrices-as-of-others", MEMORY, "rank.in_matrices * (of_matrices - costs.state_bytes)", "0.0", (COMPUTED,)),
    Mutant("matrices-computed-by-every-rank", SECONDS, "return total / ranks / rate", "return total / rate", (COMPUTED,)),
    Mutant("experts-held-by-each-rank-of-a-layer", MEMORY, "rank.shards * folded(rank.mesh) // views(rank.mesh)", "rank.shards // views(rank.mesh)", (HELD,)),
    Mutant("kept-inputs-forgotten", MEMORY, "rank.held.alive * (inputs + job.kept *", "rank.held.alive * (job.kept *", (HELD,)),
    Mutant("one-microbatch-alive", MEMORY, "kept = rank.held.alive * (inputs", "kept = 1.0 * (inputs", (COMPUTED,)),
    Mutant("logits-of-the-batch", MEMORY, "chunk = min(rank.tokens, max(1.0, _CHUNK / 4 / vocabulary))", "chunk = rank.tokens", (HELD,)),
    Mutant("logits-on-every-stage", MEMORY, "if not rank.held.head:", "if False:", (HELD,)),
    Mutant("recomputation-of-everything", SHARE, "again = 1.0 + job.recomputed / 3", "again = 1.0 + job.recomputed", (COMPUTED,)),
    Mutant("recomputation-costs-nothing", SHARE, "again = 1.0 + job.recomputed / 3", "again = 1.0", (COMPUTED,)),
    Mutant("traffic-of-compiled-code", SECONDS, "(3.0 if rank.job.fused else 8.0)", "3.0", (COMPUTED,)),
    Mutant("the-host-hides", SECONDS, "max(0.0, _issue(rank) - compute)", "0.0", (COMPUTED,)),
    Mutant("regions-of-one-microbatch", COLLECTIVES, "calls = rank.passes * (sum", "calls = rank.passes / rank.count * (sum", (EXCHANGED,)),
    Mutant("all-of-the-matmuls-hide", COLLECTIVES, "min(seconds, matmuls) * (1 - 1 / group.ranks)", "min(seconds, matmuls)", (EXCHANGED,)),
    Mutant("stages-send-one-way", COLLECTIVES, "crossings = 2 * len(pipeline.stages)", "crossings = len(pipeline.stages)", (EXCHANGED,)),
    Mutant("pipelines-never-idle", SECONDS, "sum(found.values()) * rank.job.pipeline.idle", "0.0", (COMPUTED,)),
    Mutant("the-best-rank-counts", GUESS, "seconds = max((seconds_of(rank)", "seconds = min((seconds_of(rank)", (COMPUTED,)),
    Mutant("stages-like-the-ends", TIMES, "[one for one in ran if 0 < one < last] or ", "", (STAGES,)),
    Mutant("gradients-of-inputs-like-the-first", TIMES, '{"F": (), "B": ()}.get(kind, (0,))', '{"F": (), "B": ()}.get(kind, ())', (STAGES,)),
    Mutant("stages-of-mean-weight", TIMES, "block * weights[stage] for stage", "block for stage", (STAGES,)),
    Mutant("jobs-use-more-than-they-reserve", NEED, "return self.allocated + self.idle", "return self.idle", (RESERVED,)),
    Mutant("the-smaller-model-counts", NEED, "most, idle, retries = max(least, float(found.allocated))", "most, idle, retries = min(least, float(found.allocated))", (RESERVED,)),
    Mutant("frozen-parameters-have-state", "simulate/estimate/job_memory.py", "int(state * trained)", "int(state * parameters)", ("tests/simulate/test_job_memory.py",)),
    Mutant("frozen-parameters-have-gradients", "simulate/estimate/job_memory.py", "LeastState(parameters + reference, trained,", "LeastState(parameters + reference, parameters,", ("tests/simulate/test_job_memory.py",)),
    Mutant("shared-parameters-not-frozen", "simulate/estimate/job_memory.py", "if name in tied or matches", "if matches", ("tests/simulate/test_job_memory.py",)),
    Mutant("frozen-blocks-extended-like-others", "simulate/estimate/estimate.py", "kinds.append([fixed, *mixers,", "kinds.append([*mixers,", ("tests/integration/test_estimate.py::test_a_few_blocks_give_the_memory_of_all",)),
    Mutant("stages-with-other-rates-simulated-again", "simulate/estimate/stages.py", '"optimizer.lr", ', "", ("tests/integration/test_estimated_stages.py",)),
    Mutant("all-stages-have-one-step", "simulate/estimate/stages.py", "if not matches(", "if matches(", ("tests/integration/test_estimated_stages.py",)),
    Mutant("later-stages-are-not-assembled", "simulate/cli/planned_stage.py", "        list(self.later(more))\n        return", "        return", ("tests/integration/test_estimated_stages.py",)),
    Mutant("plans-fit-the-smallest-stage", "simulate/cli/planned_stage.py", "largest = max(peaks", "largest = min(peaks", ("tests/integration/test_estimated_stages.py",)),
    Mutant("later-stages-take-what-they-set", "simulate/cli/planned_stage.py", "if one.key not in own]", "]", ("tests/integration/test_estimated_stages.py",)),
    Mutant("a-plan-of-a-stage-adds-to-it", "simulate/cli/planned_stage.py", "table.setdefault(section, {}).pop(name, None)", "table.setdefault(section, {})", ("tests/integration/test_estimated_stages.py",)),
    Mutant("reduced-jobs-keep-their-shards", "simulate/estimate/estimate.py", "str(fewer_sequences), **OWN_SHARDS}", "str(fewer_sequences)}", ("tests/integration/test_estimated_stages.py",)),
)  # fmt: skip
