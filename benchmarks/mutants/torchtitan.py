"""Mistakes in the imports of TorchTitan's recipes."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

VALUES, RULES, COMMAND = (
    "tests/torchtitan/test_values.py",
    "tests/torchtitan/test_rules.py",
    "tests/torchtitan/test_command.py",
)
DECIDED, READING, IMPORTING = "torchtitan/values.py", "torchtitan/reading.py", "torchtitan/importing.py"

MUTANTS = (
    Mutant("validation-batches-rounded-down", DECIDED, "-(-steps * local // train_local)", "steps * local // train_local", (VALUES,)),
    Mutant("validation-batches-of-training", DECIDED, "-(-steps * local // train_local)", "steps", (VALUES,)),
    Mutant("defaults-missing", "torchtitan/rules.py", 'if values.get(key, "") == ""', 'if values.get(key, 0) == ""', (VALUES, RULES)),
    Mutant("cublas-rounds-up", DECIDED, '"mxfp8_cublas": {"mx.recipe_name": "mxfp8_floor"}', '"mxfp8_cublas": {"mx.recipe_name": "mxfp8_rceil"}', (VALUES,)),
    Mutant("head-stays-in-high-precision", DECIDED, '{f"{section}.convert_head": True, **new}', "new", (VALUES,)),
    Mutant("decays-all-but-norms", IMPORTING, '{"optimizer.param_groups": []}', "{}", (VALUES, RULES)),
    Mutant("schedule-cut-short", DECIDED, '"training.steps": total, "training.stop_at_step": steps', '"training.steps": steps, "training.stop_at_step": steps', (VALUES,)),
    Mutant("short-schedules-accepted", DECIDED, 'if total < outcome.asked["training.steps"]:', "if False:", (VALUES,)),
    Mutant("refusals-without-their-switch", IMPORTING, "elif not holds(rule.when, outcome.asked):", "elif False:", (VALUES,)),
    Mutant("unknown-keys-need-no-attention", "torchtitan/outcome.py", 'in ("unsupported", "unknown")', 'in ("unsupported",)', (VALUES, COMMAND)),
    Mutant("renamed-keys-stay-the-same", "torchtitan/outcome.py", '"same" if same else "changed"', '"same"', (VALUES, COMMAND)),
    Mutant("titan-recipes-imported", READING, "if only_titan and all(", "if False and all(", (COMMAND, VALUES)),
    Mutant("older-recipes-imported", READING, "    if older:\n", "    if False:\n", (COMMAND, RULES)),
)  # fmt: skip
