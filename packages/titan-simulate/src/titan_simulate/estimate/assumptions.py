"""Assumptions of an estimate besides the figures of the machine, as text. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan_core.api.plugins.assembled_job import AssembledJob
from titan_simulate.costs import costs_of
from titan_simulate.estimate.tensor_overlap import NEAR
from titan_simulate.hardware.machine import Machine

if TYPE_CHECKING:
    from titan_simulate.estimate.traced_rank import TracedRank


def assumptions_of(
    job: AssembledJob, samples: Sequence[TracedRank], machine: Machine, imbalance: float
) -> dict[str, Any]:  # fmt: skip
    """Return how ``job`` was reduced, and what the model of its step takes for granted.

    Args:
        samples: one of each simulated rank.
        imbalance: rows of the busiest rank's experts, by the mean.
    """
    from titan_simulate.engine.observation import TENSORS_PER_LAUNCH

    first = samples[0]
    costs = list(costs_of(job.transforms, job))
    pipeline = next((one.pipeline for one in costs if one.pipeline is not None), None)
    whole = job.batch.microbatches if pipeline is None else pipeline.microbatches
    ranks = sorted({one.rank for one in samples})
    size = job.mesh.world_size
    simulated = "all" if first.microbatches == whole else f"{first.microbatches} of {whole}"
    found: dict[str, Any] = {
        "simulated microbatches": simulated,
        "factor of forward and backward": whole / first.microbatches,
        "simulated ranks": f"{' and '.join(map(str, ranks))} of {size}" + (", for all" if size > len(ranks) else ""),
        "foreach operators": f"a kernel for {TENSORS_PER_LAUNCH} tensors",
    }
    if pipeline is not None and len(pipeline.stages) > len(ranks):
        found["time of other stages"] = "that of their blocks, as in the simulated ones"
    if any(one.overlaps_matmuls for one in costs):
        found["asynchronous tensor parallelism"] = (
            f"a matmul hides the collective within {NEAR} operators of it, except for one rank's share"
        )
    for view in job.mesh.views:
        degree = job.mesh.view_degrees[view.name]
        if view.shards_parameters and degree > 1:
            innermost = max(place for place, dim in enumerate(job.mesh.dims) if dim.name in view.borrows)
            inside = math.prod(job.mesh.degrees[dim.name] for dim in job.mesh.dims[innermost + 1 :])
            together = max(1, min(degree, machine.ranks_per_node // inside))
            busy = (
                "even" if imbalance == 1.0 else f"the busiest rank has {imbalance:g} times the mean, of time but not memory"
            )
            found["expert routing"] = busy
            found["rows of experts"] = (
                f"{1 - 1 / degree:.0%} leave their rank, {1 - together / degree:.0%} their node, whatever is chosen"
            )
    return found
