"""Mistakes in estimates and plans."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

ROOFLINE, STAGES, ALLOCATOR, RESERVED, KINDS, COSTS = (
    "tests/simulate/test_roofline.py",
    "tests/simulate/test_pipeline.py",
    "tests/simulate/test_allocator.py",
    "tests/simulate/test_reserved.py",
    "tests/simulate/test_kinds.py",
    "tests/simulate/test_kind_costs.py",
)
TABLE, OPEN, MESHES, TRACED = (
    "simulate/plan/kind_table.py",
    "simulate/plan/open_kinds.py",
    "simulate/plan/meshes.py",
    "simulate/plan/traced_kind.py",
)
OF_KIND, COMPOSED = "simulate/plan/kind_costs.py", "simulate/plan/compose.py"
TIMES, NEED, CLASSES = (
    "simulate/estimate/pipeline.py", "simulate/estimate/reserved.py", "simulate/estimate/block_classes.py",
)  # fmt: skip

MUTANTS = (
    Mutant("planned-without-stages", "simulate/cli/plan_result.py", "} if config.stages else {}", "} if False else {}", ("tests/integration/test_plan.py",)),
    Mutant("knee-where-a-doubling-saves-less-than-half", "simulate/cli/plan_table.py", "KNEE: Final = 0.4", "KNEE: Final = 0.5", ("tests/simulate/test_plan_table.py",)),
    Mutant("knee-beyond-an-unfinished-row", "simulate/cli/plan_table.py", "row.plan and row.plan.winner, doubled.plan and doubled.plan.winner", "row.best, doubled.best", ("tests/simulate/test_plan_table.py",)),
    Mutant("days-of-all-gpus-together", "simulate/cli/run_length.py", "return cls(steps, hours / 24, hours * gpus,", "return cls(steps, hours / 24 * gpus, hours * gpus,", ("tests/simulate/test_plan_table.py",)),
    Mutant("blocks-named-by-two-parts", CLASSES, '[: blocks.count(".") + 2]', "[:2]", (KINDS,)),
    Mutant("blocks-repeat-from-the-first", CLASSES, "for first in range(len(classes))]", "for first in range(1)]", (KINDS,)),
    Mutant("blocks-that-stand-for-others-as-one", NEED, "(whole - len(kept)) // repeating", "whole - len(kept)", ("tests/integration/test_estimate.py::test_a_few_blocks_give_the_memory_of_all",)),
    Mutant("experts-descend-from-whole-layers", OPEN, 'relation == "experts")', "False)", (KINDS,)),
    Mutant("faster-choices-are-excluded-too", TABLE, "found &= column >= own", "pass", (KINDS,)),
    Mutant("slower-choices-bound-memory", TABLE, '"slower" if slower[number] else "same"', '"same"', (KINDS,)),
    Mutant("activations-that-do-not-fit-cost-nothing", OPEN, "if filled <= 1.0:", "if True:", (KINDS,)),
    Mutant("larger-degrees-are-unknown", TABLE, "elif smaller:", "elif False:", (KINDS,)),
    Mutant("small-jobs-without-other-ranks", MESHES, "degrees[sharding[0]] = 2 * fewest", "degrees[sharding[0]] = fewest", (KINDS,)),
    Mutant("a-chunk-of-the-loss-for-all-sequences", TRACED, "times = batch - 1 if", "times = 1 if", (COSTS,)),
    Mutant("microbatches-of-one-sequence", TRACED, "return few + (more - few) * (batch - 1)", "return few", (COSTS,)),
    Mutant("waits-at-positions-of-the-shorter-trace", TRACED, "        two, reads=", "        one, reads=", (COSTS,)),
    Mutant("groups-of-the-small-job", OF_KIND, "int(len(ranks) * scale)", "len(ranks)", (COSTS,)),
    Mutant("replicas-sum-nothing", OF_KIND, 'if "reduce" in work.name and len(data.replicas) > 1', "if False", (COSTS,)),
    Mutant("all-microbatches-reduce", COMPOSED, "if not job.gradients_stay:", "if True:", (COSTS,)),
    Mutant("parameters-are-gathered-again", COMPOSED, '("forward",) if job.parameters_stay else', "", (COSTS,)),
    Mutant("transfers-that-do-not-take-place", OF_KIND, "not in transfers", "in ()", (COSTS,)),
    Mutant("experts-of-other-groups", MESHES, "return any(tuple(ranks) == ranks_along", "return all(tuple(ranks) == ranks_along", (KINDS,)),
    Mutant("pipelines-never-idle", COMPOSED, "busy * job.microbatches * job.pipeline.idle", "0.0", (COSTS,)),
    Mutant("one-microbatch-alive", COMPOSED, "job.pipeline.alive[rank] - 1) * of_microbatch", "0.0) * of_microbatch", (COSTS,)),
    Mutant("gradients-of-one-microbatch", COMPOSED, "gradients - moment.gradients if number > 1 else 0.0", "0.0", (COSTS,)),
    Mutant("gathered-parameters-take-nothing", COMPOSED, "job.gradients_stay + job.width * job.parameters_stay", "job.gradients_stay", (COSTS,)),
    Mutant("the-mean-rank-counts", COMPOSED, "for rank, blocks in held), key=lambda one: one[2])", "for rank, blocks in held), key=lambda one: -one[2])", (COSTS,)),
    Mutant("kinds-that-cannot-win-are-traced", "simulate/plan/search.py", "if one.step < limit]", "]", ("tests/integration/test_plan.py",)),
    Mutant("a-host-that-issues-while-it-waits", "simulate/estimate/timeline.py", "missing[position] += 1", "pass", (ROOFLINE,)),
    Mutant("stages-like-the-ends", TIMES, "[one for one in ran if 0 < one < last] or ", "", (STAGES,)),
    Mutant("gradients-of-inputs-like-the-first", TIMES, '{"F": (), "B": ()}.get(kind, (0,))', '{"F": (), "B": ()}.get(kind, ())', (STAGES,)),
    Mutant("stages-of-mean-weight", TIMES, "block * weights[stage] for stage", "block for stage", (STAGES,)),
    Mutant("jobs-use-more-than-they-reserve", NEED, "return self.allocated + self.idle", "return self.idle", (RESERVED,)),
    Mutant("the-smaller-model-counts", NEED, "most, idle, retries = max(least, float(found.allocated))", "most, idle, retries = min(least, float(found.allocated))", (RESERVED,)),
    Mutant("frozen-parameters-have-state", "simulate/estimate/job_memory.py", "int(state * trained)", "int(state * parameters)", ("tests/simulate/test_job_memory.py",)),
    Mutant("frozen-parameters-have-gradients", "simulate/estimate/job_memory.py", "LeastState(parameters + reference, trained,", "LeastState(parameters + reference, parameters,", ("tests/simulate/test_job_memory.py",)),
    Mutant("shared-parameters-not-frozen", "simulate/estimate/job_memory.py", "if name in tied or matches", "if matches", ("tests/simulate/test_job_memory.py",)),
    Mutant("frozen-blocks-extended-like-others", "simulate/estimate/block_classes.py", "kind = [fixed, *mixers,", "kind = [*mixers,", ("tests/integration/test_estimate.py::test_a_few_blocks_give_the_memory_of_all",)),
    Mutant("stages-with-other-rates-simulated-again", "simulate/estimate/stages.py", '"optimizer.lr", ', "", ("tests/integration/test_estimated_stages.py",)),
    Mutant("all-stages-have-one-step", "simulate/estimate/stages.py", "if not matches(", "if matches(", ("tests/integration/test_estimated_stages.py",)),
    Mutant("later-stages-are-not-assembled", "simulate/cli/planned_stage.py", "        list(self.later(more))\n        return", "        return", ("tests/integration/test_estimated_stages.py",)),
    Mutant("plans-fit-the-smallest-stage", "simulate/cli/planned_stage.py", "largest = max(peaks", "largest = min(peaks", ("tests/integration/test_estimated_stages.py",)),
    Mutant("later-stages-take-what-they-set", "simulate/cli/planned_stage.py", "if one.key not in own]", "]", ("tests/integration/test_estimated_stages.py",)),
    Mutant("a-plan-of-a-stage-adds-to-it", "simulate/cli/planned_stage.py", "table.setdefault(section, {}).pop(name, None)", "table.setdefault(section, {})", ("tests/integration/test_estimated_stages.py",)),
    Mutant("reduced-jobs-keep-their-shards", "simulate/estimate/estimate.py", "str(fewer_sequences), **OWN_SHARDS}", "str(fewer_sequences)}", ("tests/integration/test_estimated_stages.py",)),
)  # fmt: skip
