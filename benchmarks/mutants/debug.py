"""Mistakes in debugging."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

MFU, NUMERICS, STRAGGLERS, ANALYSIS, CAPACITY, TRACE, VERIFY = (
    "tests/debug/test_mfu.py",
    "tests/debug/test_numerics.py",
    "tests/debug/test_stragglers.py",
    "tests/debug/test_flight_analysis.py",
    "tests/debug/test_flight_capacity.py",
    "tests/debug/test_trace_summary.py",
    "tests/debug/test_verify.py",
)
VERDICT, DEVICES = "debug/devices/verdict.py", "tests/debug/test_device_check.py"
MATCHING, SPIKE, CURVES = "debug/flight/matching.py", "debug/numerics/loss_spike.py", "debug/verify/curves.py"

MUTANTS = (
    Mutant("mfu-of-one-device", "debug/mfu.py", "speed * self._ideal.seconds / self._devices", "speed * self._ideal.seconds", (MFU,)),
    Mutant("mfu-of-one-data-rank", "debug/mfu.py", "self._devices = run.world.size", "self._devices = run.world.data_size", (MFU,)),
    Mutant("flops-of-every-rank", "debug/mfu.py", 'if world.is_first_along("batch", "sequence", "weights"):', "if True:", (MFU,)),
    Mutant("peak-of-bf16-in-8-bits", "debug/peak_flops.py", "return in_8_bits if dtype.itemsize == 1 and in_8_bits is not None else bf16", "return bf16", (MFU,)),
    Mutant("other-types-count-twice", "debug/peak_flops.py", "flops_per_token - sum(others.values())", "flops_per_token", (MFU,)),
    Mutant("published-peaks-are-estimates", "debug/peak_flops.py", "estimated |= peak is None", "estimated |= peak is not None", (MFU,)),
    Mutant("spikes-of-the-variance", SPIKE, " / math.sqrt(len(self.losses))", " / len(self.losses)", (NUMERICS,)),
    Mutant("spikes-among-few-losses", SPIKE, "if len(self.losses) >= min(FEWEST, self.losses.maxlen or 0):", "if self.losses:", (NUMERICS,)),
    Mutant("spikes-below-the-mean", SPIKE, "if loss > mean + self._sigma * deviation:", "if loss < mean - self._sigma * deviation:", (NUMERICS,)),
    Mutant("device-forgets-the-oldest-late", SPIKE, "slots == self._added % self._window", "slots == self._added % (self._window - 1)", (NUMERICS,)),
    Mutant("device-spikes-of-empty-slots", SPIKE, "torch.where(present, losses - mean, 0.0)", "(losses - mean)", (NUMERICS,)),
    Mutant("median-of-two-is-the-slow-one", "debug/stragglers.py", "statistics.median_low(group)", "statistics.median_high(group)", (STRAGGLERS,)),
    Mutant("microseconds-make-a-straggler", "debug/stragglers.py", "max(ratio * median, median + LEAST_SECONDS)", "ratio * median", (STRAGGLERS,)),
    Mutant("stages-compared-with-each-other", "debug/stragglers.py", "groups.setdefault(kind, []).append(one)", "groups.setdefault(kind, list(seconds))", (STRAGGLERS,)),
    Mutant("slow-windows-never-end", "debug/stragglers.py", "self._slow_windows.get(rank, 0) + 1 for rank in slow", "self._slow_windows.get(rank, 0) + 1 for rank in range(len(seconds))", (STRAGGLERS,)),
    Mutant("the-smallest-group-is-right", MATCHING, "key=len, reverse=True", "key=len", (ANALYSIS,)),
    Mutant("shapes-by-rows", MATCHING, "sum(math.prod(size) for size in entry.input_sizes)", "sum(size[0] for size in entry.input_sizes if size)", (ANALYSIS,)),
    Mutant("waits-for-the-last-pending", MATCHING, "return min(pending, key=lambda entry: entry.seq)", "return max(pending, key=lambda entry: entry.seq)", (ANALYSIS,)),
    Mutant("who-has-arrived-is-absent", MATCHING, "channel.last(rank) < seq]", "channel.last(rank) <= seq]", (ANALYSIS,)),
    Mutant("silent-ranks-are-behind", MATCHING, "rank not in channel.by_rank or rank in channel.forgotten", "rank in channel.forgotten", (ANALYSIS,)),
    Mutant("touching-intervals-count-twice", "debug/profiling/trace_summary.py", "return begun > ended", "return begun >= ended", (TRACE,)),
    Mutant("difference-is-symmetric", "debug/profiling/trace_summary.py", "in_one & ~in_other", "in_one ^ in_other", (TRACE,)),
    Mutant("outvoted-by-repetitions", VERDICT, "most = max(map(len, groups_of))", "most = max(map(len, kinds))", (DEVICES,)),
    Mutant("changing-ranks-are-outvoted", VERDICT, "blamed = changing or outvoted or tied", "blamed = outvoted or tied", (DEVICES,)),
    Mutant("all-ranks-of-a-group-blamed", VERDICT, " if one.place == earliest]", "]", (DEVICES,)),
    Mutant("experts-make-no-groups", "debug/devices/groups.py", "for view in plan.views:", "for view in ():", (DEVICES,)),
    Mutant("rms-is-the-variance", "debug/numerics/statistics.py", "math.sqrt(self.square_sum / self.count)", "self.square_sum / self.count", (VERIFY, "tests/debug/test_statistics_on_demand.py")),
    Mutant("totals-hide-nan", "debug/numerics/statistics.py", "math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan", "math.fsum(one for one in sums if math.isfinite(one))", (VERIFY, "tests/debug/test_statistics_on_demand.py")),
    Mutant("missing-steps-agree", CURVES, "if not _relative(expected, actual) <= tolerance:", "if _relative(expected, actual) > tolerance:", (VERIFY,)),
    Mutant("rounding-of-zero-gradients-departs", CURVES, "size = max(expected.rms, floor, 1e-30)", "size = max(expected.rms, 1e-30)", (VERIFY,)),
    Mutant("gradients-in-forward-order", CURVES, "for name in reversed({**ours, **theirs}):", "for name in {**ours, **theirs}:", (VERIFY,)),
    Mutant("recorder-forgets-accumulation", "debug/flight/collect.py", "passes = batch.microbatches * ", "passes = ", (CAPACITY,)),
)  # fmt: skip
