"""An objective that needs whole sequences is refused when ranks share them. One of sums over documents works on any mesh:
``tests/integration/test_example_suites.py``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import small_gpt
from titan_core.api import Batch, Objective, ObjectiveFunction, Ref, Vocabulary
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_job


class OfSequences(ObjectiveFunction):
    per_position = False

    def __init__(self, context: Any) -> None: ...

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        return logits.sum()


def train(folder: str) -> None:
    os.chdir(folder)
    job = small_gpt.job_of(small_gpt.definition(), {"parallelism.context_parallel_degree": 2}, 2)
    build: Any = Ref(f"{__name__}:OfSequences")
    run_job(replace(job, objective=Objective(name="own", summary="", build=build, extras=())))


def test_an_objective_of_whole_sequences_is_refused(gloo: GlooPool, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match="needs all positions of a sequence together, and context parallelism divides them"
    ):
        gloo.run(2, train, str(tmp_path))
