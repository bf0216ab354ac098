"""The least memory that a job's state takes, from its sizes alone: a line of ``titan job show``, and the warning of ``titan
train`` about a job that cannot fit.

The model's definition has the number of parameters, and the mesh the number of ranks that hold them together. The most
loaded of these ranks holds at least its even share, whatever the rules by which parameters are divided and replicated. A
lower bound is what a warning needs: it is never wrong about a job that fits. ``titan estimate`` computes what a job needs.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict, dataclass

from titan_core.api import Job, matches
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import parse_integer
from titan_core.toolkit.hookspecs import JobFact
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.text import show_bytes
from titan_simulate.costs import costs_of_optimizer

log = logging.getLogger(__name__)

FITS_ANYWHERE = 2**30
"""Bytes that every device has."""
FP32 = 4
"""Bytes of a parameter as the optimizer keeps it, and of its gradient."""


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
    reference = 0 if job.reference is None else FP32 * math.ceil(job.reference.model.num_params / holders(job))
    trained = FP32 * math.ceil((job.model.num_params - sum(frozen_parameters(job).values())) / holders(job))
    costs = costs_of_optimizer(job.optimizer, job)
    state = 0.0  # of an element, if that is unknown
    if costs is not None:
        state = min(costs.state_bytes, costs.state_bytes if costs.matrix_state_bytes is None else costs.matrix_state_bytes)
    return LeastState(parameters + reference, trained, int(state * trained) // FP32, _block_inputs(job))


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


def memory_fact(job: AssembledJob) -> JobFact:
    """Return the least memory of a rank, for ``titan job show``."""
    least = least_state(job)
    parts = {
        "parameters": least.parameters,
        "gradients": least.gradients,
        "optimizer state": least.optimizer_state,
    }
    where = "host" if job.config.section(TrainingSection).enable_cpu_offload else "device"
    shown = ", ".join(f"{what} {show_bytes(size)}" for what, size in parts.items() if size)
    text = (
        f"at least {show_bytes(least.state)} on the {where} of a rank ({shown}), and {show_bytes(least.block_inputs)} "
        "for the inputs of blocks; `titan estimate` simulates the rest"
    )
    return JobFact("memory", text, {**asdict(least), "state": least.state, "where": where})


def warn_if_too_large(job: AssembledJob) -> None:
    """Log a warning if the state of ``job`` alone exceeds the memory of this rank's device.

    Raises:
        UserError: there is no such device.
    """
    needed = least_state(job).state
    if needed <= FITS_ANYWHERE or job.config.section(TrainingSection).enable_cpu_offload or current_simulation() is not None:
        return
    memory, what = _device_memory(job.config.section(JobSection).device)
    if needed > memory:
        log.warning(
            "this job cannot fit: parameters, gradients and optimizer state take at least %s on a rank, and %s has %s; "
            "divide it over more ranks (`titan plan` finds a way), or set training.enable_cpu_offload = true",
            show_bytes(needed),
            what,
            show_bytes(memory),
        )


def _device_memory(choice: str) -> tuple[int, str]:
    """Return the bytes that this rank can use at most, and what has them."""
    import torch

    from titan_core.toolkit.device import choose_device, device_name

    device = choose_device(choice)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, device_name(device)
    ranks = parse_integer(os.environ.get("LOCAL_WORLD_SIZE", "1"), 1, 10_000) or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory // ranks, "this machine" if ranks == 1 else f"each of the {ranks} ranks of this machine"


def frozen_parameters(job: AssembledJob) -> dict[str, int]:
    """Return name -> number of elements of each frozen parameter, a shared one once. Imports torch if there may be some."""
    patterns = job.section(TrainingSection).freeze
    if not patterns:
        return {}
    from titan_simulate.estimate.shapes import shapes_of

    tied = {source for name, source in job.model.layout.tied.items() if matches(name, patterns)}
    shapes = shapes_of(job.family.define, job.model_args).parameters
    return {name: math.prod(shape) for name, shape in shapes.items() if name in tied or matches(name, patterns)}
