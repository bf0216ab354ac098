"""Mistakes in the imports of TorchTitan's recipes."""

# ruff: noqa: E501 (a table: one mistake per line)

from __future__ import annotations

from benchmarks.mutants.mutant import Mutant

VALUES, CATALOGUE, COMMAND = (
    "tests/torchtitan/test_values.py",
    "tests/torchtitan/test_catalogue.py",
    "tests/torchtitan/test_command.py",
)
DATA, FLOAT8, OPTIMIZATION, PARALLELISM = (
    "torchtitan/data.py",
    "torchtitan/float8.py",
    "torchtitan/optimization.py",
    "torchtitan/parallelism.py",
)

MUTANTS = (
    Mutant("validation-batches-rounded-down", DATA, "-(-steps * local // train_local)", "steps * local // train_local", (VALUES,)),
    Mutant("validation-batches-of-training", DATA, "-(-steps * local // train_local)", "steps", (VALUES,)),
    Mutant("default-validation-missing", DATA, '            outcome.default("validation.freq", 10)\n', "            pass\n", (VALUES,)),
    Mutant("cublas-rounds-up", FLOAT8, '"mxfp8_cublas": {"mx.recipe_name": "mxfp8_floor"}', '"mxfp8_cublas": {"mx.recipe_name": "mxfp8_rceil"}', (VALUES,)),
    Mutant("delayed-scaling-accepted", FLOAT8, 'if enabled and old.get(key, "dynamic") != "dynamic":', "if False:", (VALUES,)),
    Mutant("head-stays-in-high-precision", FLOAT8, "outcome.default(convert, True,", "outcome.default(convert, False,", (VALUES,)),
    Mutant("decays-all-but-norms", OPTIMIZATION, '    outcome.default("optimizer.param_groups", [], "TorchTitan decays every parameter, also norms")\n', "", (VALUES, CATALOGUE)),
    Mutant("schedule-cut-short", OPTIMIZATION, '{"training.steps": total}', '{"training.steps": steps}', (VALUES,)),
    Mutant("short-schedules-accepted", OPTIMIZATION, "    if total < steps:\n", "    if False:\n", (VALUES,)),
    Mutant("steps-by-titans-default", OPTIMIZATION, '        outcome.default("training.steps", _STEPS)\n', "        pass\n", (VALUES, CATALOGUE)),
    Mutant("negative-seeds-accepted", OPTIMIZATION, 'if old.get("debug.seed", 0) < 0:', "if False:", (VALUES,)),
    Mutant("ddp-is-fsdp", PARALLELISM, '{"parallelism.data_parallel_replicate_degree": degree, _SHARD: 1}', '{_SHARD: degree}', (VALUES,)),
    Mutant("one-stage-per-rank", PARALLELISM, "per_rank = 2 if schedule in _TWO_STAGES_PER_RANK else 1", "per_rank = 1", (VALUES,)),
    Mutant("split-points-of-ranks", PARALLELISM, "len(old.get(_SPLIT_POINTS)) + 1, 1", "len(old.get(_SPLIT_POINTS)), 1", (VALUES,)),
    Mutant("unknown-keys-need-no-attention", "torchtitan/outcome.py", 'in ("unsupported", "unknown")', 'in ("unsupported",)', (VALUES, COMMAND)),
    Mutant("renamed-keys-stay-the-same", "torchtitan/outcome.py", "Entry(\"same\" if same else \"changed\"", "Entry(\"same\"", (VALUES, COMMAND)),
    Mutant("titan-recipes-imported", "torchtitan/reading.py", "if titan and not any(_only_torchtitan(name) for name in known):", "if False:", (COMMAND, VALUES)),
)  # fmt: skip
