"""Checks a model for a mesh in one process, with the checks that building it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import small_gpt
from harness.small_gpt import LAYOUT, SmallGPT
from titan_core.api import ModelLayout
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.layout_check import check_layout
from titan_core.model.layout_trial import try_model

ONE: dict[str, object] = {"training.global_batch_size": 2}
DP: dict[str, object] = {}
TP, PP, CP = ({f"parallelism.{name}_parallel_degree": 2} for name in ("tensor", "pipeline", "context"))
NO_SP = {**TP, "parallelism.disable_sequence_parallel": "true"}
DOCUMENTS = {**ONE, "data.document_mask": "true"}
MESHES: dict[str, dict[str, object]] = {
    "one device": ONE, "FSDP": DP, "TP": TP, "TP without SP": NO_SP, "PP": PP, "CP": CP, "documents": DOCUMENTS,
}  # fmt: skip


def require(job: AssembledJob) -> None:
    """Run the checks of the job's model without the ranks that it needs."""
    with torch.device("meta"):
        model: Any = job.model.build()
    check_layout(model, job.model.layout, "small")
    try_model(model, job, None, torch.device("cpu"))  # type: ignore[arg-type]


def job_on(mesh: dict[str, object], build: Callable[[], object] = SmallGPT, layout: ModelLayout = LAYOUT) -> AssembledJob:
    return small_gpt.job_of(small_gpt.definition(build, layout), mesh, 1 if mesh in (ONE, DOCUMENTS) else 2)
