"""All mutants, in groups by area."""

from __future__ import annotations

from benchmarks.mutants import (
    ckpt,
    cluster,
    completion,
    core,
    data,
    datasets,
    debug,
    experts,
    float8,
    ft,
    inference,
    launch,
    models_hf,
    models_llama,
    models_qwen3,
    optim,
    parallel,
    provenance,
    report,
    simulate,
    stages,
)
from benchmarks.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *core.MUTANTS, *data.MUTANTS, *provenance.MUTANTS, *ckpt.MUTANTS, *parallel.MUTANTS, *float8.MUTANTS, *experts.MUTANTS,
    *ft.MUTANTS, *inference.MUTANTS, *models_hf.MUTANTS,
    *models_llama.MUTANTS, *models_qwen3.MUTANTS, *optim.MUTANTS,
    *debug.MUTANTS, *completion.MUTANTS, *cluster.MUTANTS, *launch.MUTANTS,
    *report.MUTANTS, *datasets.MUTANTS, *simulate.MUTANTS, *stages.MUTANTS,
)  # fmt: skip
