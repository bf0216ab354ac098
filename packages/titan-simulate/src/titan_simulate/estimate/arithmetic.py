"""The least memory that a job's state takes, from its sizes alone. Free of torch.

The model's definition has the number of parameters, and the mesh the number of ranks that hold them together. The most
loaded of these ranks holds at least its even share, whatever the rules by which parameters are divided and replicated. A
lower bound is what a warning needs: it is never wrong about a job that fits. ``titan estimate`` computes what a job needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan_core.api import Job
from titan_core.toolkit.jobs import AssembledJob
from titan_core.toolkit.sections import TrainingSection

FP32 = 4
"""Bytes of a parameter as the optimizer keeps it, and of its gradient."""
STATES = {"AdamW": 2, "Adam": 2}
"""Optimizer -> values that it keeps for each parameter, in fp32. Others count as none, because their state is unknown."""


@dataclass(frozen=True)
class LeastState:
    """Bytes on the most loaded rank, at least."""

    parameters: int
    gradients: int
    optimizer_state: int
    block_inputs: int
    """What recomputation of whole blocks keeps of a microbatch: the input of each block of the rank."""

    @property
    def state(self) -> int:
        """Bytes that exist together when the optimizer takes its step."""
        return self.parameters + self.gradients + self.optimizer_state


def least_state(job: AssembledJob) -> LeastState:
    """Return the least memory of the state of ``job``."""
    parameters = FP32 * math.ceil(job.model.num_params / holders(job))
    return LeastState(parameters, parameters, STATES.get(job.optimizer.name, 0) * parameters, _block_inputs(job))


def holders(job: Job) -> int:
    """Return the number of ranks that hold the parameters together: all that do not hold copies for data parallelism."""
    mesh = job.mesh
    copies = [dim for dim in mesh.dims if dim.diverges or (dim.sees_different_data and dim.data_parallel == "replicate")]
    return mesh.world_size // math.prod(mesh.degrees[dim.name] for dim in copies)


def _block_inputs(job: Job) -> int:
    training, layout, mesh = job.section(TrainingSection), job.model.layout, job.mesh
    width = 2 if training.mixed_precision_param == "bfloat16" else FP32
    within = math.prod(mesh.degrees[dim.name] for dim in mesh.dims if dim.divides in ("sequence", "weights"))
    tokens = job.batch.local_size * math.ceil(job.batch.seq_len / within)
    return math.ceil(layout.num_blocks / mesh.degree("pp")) * tokens * layout.dim * width
