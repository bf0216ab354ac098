"""How many collectives the Flight Recorder keeps. Free of torch."""

from __future__ import annotations

import math

from titan_core.api import Job

STEPS = 4
"""Number of steps whose collectives are kept: enough to see what a step that hangs does differently from those before."""
LEAST, MOST = 2_000, 50_000  # an entry takes 1 to 2 KB, most of it its stack
_PER_BLOCK_OF_DATA_PARALLELISM = 3  # gather the parameters forward and backward, reduce their gradients
_PER_BLOCK_OF_A_DIVISION = 12  # divided weights, sequences or experts: 4 forward, 4 backward, 4 recomputed
_PER_STAGE = 4  # receive and send, forward and backward
_PER_STEP = 20


def capacity(job: Job) -> int:
    """Return the number of collectives of a rank in :data:`STEPS` steps, within bounds."""
    return min(max(LEAST, STEPS * collectives_per_step(job)), MOST)


def collectives_per_step(job: Job) -> int:
    """Return an estimate of the number of collectives, sends and receives of a rank in a step, rather too high than too
    low."""
    mesh, batch = job.mesh, job.batch
    active = [dim for dim in mesh.dims if mesh.degrees[dim.name] > 1]
    stages = math.prod(mesh.degrees[dim.name] for dim in active if dim.divides == "layers")
    divisions = sum(dim.divides in ("weights", "sequence") for dim in active) + sum(
        degree > 1 for degree in mesh.view_degrees.values()
    )
    per_block = _PER_BLOCK_OF_A_DIVISION * divisions
    if mesh.data_degree > 1:
        per_block += _PER_BLOCK_OF_DATA_PARALLELISM
    # A pipeline may divide a batch into its sequences.
    passes = batch.microbatches * (batch.local_size if stages > 1 else 1)
    per_pass = per_block * (job.model.layout.num_blocks / stages + 2) + (_PER_STAGE if stages > 1 else 0)
    return math.ceil(_PER_STEP + passes * per_pass)
