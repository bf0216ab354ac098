"""What ``titan job show`` says about a job's memory, and the warning of ``titan train`` about a job that cannot fit."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict

from titan_core.toolkit.arguments import parse_integer
from titan_core.toolkit.jobs import AssembledJob, JobFact
from titan_core.toolkit.sections import JobSection, TrainingSection
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.text import show_bytes
from titan_simulate.estimate.arithmetic import least_state

log = logging.getLogger(__name__)

FITS_ANYWHERE = 2**30
"""Bytes that every device has."""


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
