"""Mistakes in estimates and plans."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

PLANNED, ROOFLINE, STAGES, ALLOCATOR, RESERVED = (
    "tests/simulate/test_plan_arithmetic.py",
    "tests/simulate/test_roofline.py",
    "tests/simulate/test_stage_times.py",
    "tests/simulate/test_allocator.py",
    "tests/simulate/test_reserved.py",
)
GUESS, TIMES, NEED = "simulate/plan/arithmetic.py", "simulate/estimate/stage_times.py", "simulate/estimate/reserved.py"

MUTANTS = (
    Mutant("groups-gather-their-own-share-too", GUESS, "size * (self.ranks - 1) / self.ranks / self.bandwidth", "size / self.bandwidth", (PLANNED,)),
    Mutant("calls-without-latency", GUESS, "/ self.ranks / self.bandwidth + calls * self.latency", "/ self.ranks / self.bandwidth", (PLANNED,)),
    Mutant("state-of-weights-and-gradients", GUESS, "held * 16", "held * 8", (PLANNED,)),
    Mutant("state-offloaded-in-vain", GUESS, "0.0 if job.offloads else held * 16", "held * 16", (PLANNED,)),
    Mutant("kept-inputs-forgotten", GUESS, "rank.alive * (inputs + job.kept *", "rank.alive * (job.kept *", (PLANNED,)),
    Mutant("one-microbatch-alive", GUESS, "kept = rank.alive * (inputs", "kept = 1.0 * (inputs", (PLANNED,)),
    Mutant("logits-of-the-batch", GUESS, "chunk = min(tokens, max(1.0, _CHUNK / 4 / vocabulary))", "chunk = tokens", (PLANNED,)),
    Mutant("logits-on-every-stage", GUESS, "* (4 + 2 * width) if rank.head else 0.0", "* (4 + 2 * width)", (PLANNED,)),
    Mutant("recomputation-of-everything", GUESS, "again = 1.0 + job.recomputed / 3", "again = 1.0 + job.recomputed", (PLANNED,)),
    Mutant("recomputation-costs-nothing", GUESS, "again = 1.0 + job.recomputed / 3", "again = 1.0", (PLANNED,)),
    Mutant("traffic-of-compiled-code", GUESS, "(3.0 if job.fused else 8.0)", "3.0", (PLANNED,)),
    Mutant("the-host-hides", GUESS, "max(0.0, issue - compute)", "0.0 * max(0.0, issue - compute)", (PLANNED,)),
    Mutant("regions-of-one-microbatch", GUESS, "passes = (4 + 2 * job.recomputed) * count\n                calls = passes", "passes = 4 + 2 * job.recomputed\n                calls = passes", (PLANNED,)),
    Mutant("all-of-the-matmuls-hide", GUESS, "min(found[dim.name], matmuls) * (1 - 1 / degree)", "min(found[dim.name], matmuls)", (PLANNED,)),
    Mutant("stages-send-one-way", GUESS, "crossings = 2 * len(job.pipeline.stages)", "crossings = len(job.pipeline.stages)", (PLANNED,)),
    Mutant("pipelines-never-idle", GUESS, "busy * job.pipeline.idle", "0.0 * busy * job.pipeline.idle", (PLANNED,)),
    Mutant("the-best-rank-counts", GUESS, "seconds = max((self._seconds(job, rank)", "seconds = min((self._seconds(job, rank)", (PLANNED,)),
    Mutant("stages-like-the-ends", TIMES, "[one for one in ran if 0 < one < last] or ", "", (STAGES,)),
    Mutant("gradients-of-inputs-like-the-first", TIMES, '{"F": (), "B": ()}.get(kind, (0,))', '{"F": (), "B": ()}.get(kind, ())', (STAGES,)),
    Mutant("stages-of-mean-weight", TIMES, "block * weights[stage] for stage", "block for stage", (STAGES,)),
    Mutant("jobs-use-more-than-they-reserve", NEED, "return self.allocated + self.idle", "return self.idle", (RESERVED,)),
    Mutant("the-smaller-model-counts", NEED, "most, idle, retries = max(least, float(found.allocated))", "most, idle, retries = min(least, float(found.allocated))", (RESERVED,)),
)  # fmt: skip
