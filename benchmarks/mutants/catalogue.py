"""All mutants, in groups by area."""

from __future__ import annotations

from benchmarks.mutants import ckpt, core, data, parallel
from benchmarks.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*core.MUTANTS, *data.MUTANTS, *ckpt.MUTANTS, *parallel.MUTANTS)
