"""Mistakes in starting, watching and restarting ranks."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

POLICY, ELASTIC, AGENT, RESTARTS, OPTIONS = (
    "tests/launch/test_restart_policy.py",
    "tests/launch/test_elastic.py",
    "tests/launch/test_agent.py",
    "tests/launch/test_restarts.py",
    "tests/launch/test_options.py",
)
SIGNALS, LOOP = "tests/launch/test_signals.py", "launch/agent.py"
DECIDE, SIZES, FAILURE, PROGRESS = (
    "launch/restart/policy.py",
    "launch/meeting/sizes.py",
    "launch/restart/failure.py",
    "launch/ranks/progress.py",
)

MUTANTS = (
    Mutant("progress-forgives-nothing", DECIDE, "            self._used = 0\n        self._furthest", "            pass\n        self._furthest", (POLICY,)),
    Mutant("standing-still-is-progress", DECIDE, "completed > self._furthest:", "completed >= self._furthest:", (POLICY,)),
    Mutant("waits-do-not-double", DECIDE, "limits.wait * 2.0 ** min(self._used - 2, 60)", "limits.wait", (POLICY,)),
    Mutant("waits-without-a-limit", DECIDE, "min(limits.longest_wait, limits.wait * 2.0 ** min(self._used - 2, 60))", "limits.wait * 2.0 ** min(self._used - 2, 60)", (POLICY,)),
    Mutant("the-first-restart-waits", DECIDE, "0.0 if self._used == 1 else", "0.0 if self._used == 0 else", (POLICY,)),
    Mutant("mistakes-are-restarted", DECIDE, '    EXIT_USER_ERROR: "a restart would find the same mistake",\n', "", (POLICY,)),
    Mutant("later-steps-out-of-memory-are-final", DECIDE, "status == EXIT_OUT_OF_MEMORY and completed <= begun", "status == EXIT_OUT_OF_MEMORY", (POLICY,)),
    Mutant("a-clean-end-is-not-waited-for", DECIDE, "        return grace\n", "        return GRACE_SECONDS\n", (POLICY,)),
    Mutant("killed-ranks-are-waited-for", DECIDE, "return RECORDED_SECONDS if all_recorded else KILLED_SECONDS", "return GRACE_SECONDS", (POLICY,)),
    Mutant("elastic-jobs-of-the-fewest-machines", SIZES, "for machines in range(len(counts), least - 1, -1):", "for machines in range(least, len(counts) + 1):", (ELASTIC,)),
    Mutant("elastic-jobs-below-the-least", SIZES, "for machines in range(len(counts), least - 1, -1):", "for machines in range(len(counts), 0, -1):", (ELASTIC,)),
    Mutant("ranks-of-equal-machines", SIZES, "ranks = sum(counts[:machines])", "ranks = counts[0] * machines", (ELASTIC,)),
    Mutant("batch-of-each-size", SIZES, '[*found, Override("training.global_batch_size", str(batch))] if batch else found', "found", (ELASTIC,)),
    Mutant("the-last-line-is-not-the-cause", FAILURE, "tuple(line for line, _ in reversed(lines))", "tuple(line for line, _ in lines)", (AGENT, RESTARTS)),
    Mutant("aborted-ranks-are-the-cause", FAILURE, "aborted = killed.pop(-signal.SIGABRT, [])", "aborted = []", (AGENT, RESTARTS)),
    Mutant("victims-are-causes", FAILURE, "in self.failed.values() if not outcome.follows]", "in self.failed.values()]", (AGENT, RESTARTS)),
    Mutant("the-latest-cause-decides", FAILURE, "first = min(causes, key=lambda outcome: outcome.time)", "first = max(causes, key=lambda outcome: outcome.time)", (AGENT, RESTARTS)),
    Mutant("ranks-that-a-person-stops-start-again", LOOP, "Ended.INTERRUPTED if self.interrupts else Ended.OVERTAKEN", "Ended.OVERTAKEN", (SIGNALS,)),
    Mutant("interrupts-go-to-ranks-that-have-ended", LOOP, "            self.attempt.is_over = True\n", "            pass\n", (SIGNALS,)),
    Mutant("saving-counts-as-a-step", PROGRESS, "if one.in_step and now", "if now", (AGENT, RESTARTS)),
    Mutant("the-first-step-may-not-compile", PROGRESS, "self.first if one.completed == one.begun else self.later", "self.later", (AGENT, RESTARTS)),
    Mutant("a-restart-costs-its-wait-twice", "launch/restart/recovery.py", "restart.started - restart.ended - restart.waited", "restart.started - restart.ended", (AGENT, RESTARTS)),
)  # fmt: skip
