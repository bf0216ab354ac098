"""Checks that a job and a machine meet the requirements of fault tolerance; resolves group addresses. Free of torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from titan_core.api import CheckResult, Health, HealthContext, JobContext, Problem
from titan_core.api.config.sections import JobSection, TrainingSection
from titan_core.toolkit.launching import LOCAL_ADDRESS
from titan_core.toolkit.listening import is_loopback
from titan_ft.config import FaultToleranceSection

PLATFORMS = "Linux on x86-64 with Python 3.11 to 3.13"
START_ONE = "start one with `titan ft lighthouse`, and set it to the address that this prints"


def check(context: JobContext[FaultToleranceSection]) -> Iterator[Problem]:
    """Return what a replica group cannot be or do."""
    section, job, config = context.section, context.job, context.config
    size = section.group_size
    if section.replica_id >= size:
        why = f"must be below fault_tolerance.group_size = {size}"
        yield config.problem("fault_tolerance.replica_id", why, "give each replica group a number of its own, from 0")
    if section.min_replica_size > size:
        why = f"exceeds fault_tolerance.group_size = {size}, so that no step would ever be taken"
        yield config.problem("fault_tolerance.min_replica_size", why, "lower it")
    if job.batch.microbatches < size:
        each = job.batch.local_size * job.batch.ranks
        why = f"gives each replica group {job.batch.microbatches} microbatch(es) of {each} sequences to share with "
        why += f"the other groups, but there are {size}"
        fix = f"set it to a multiple of {each}, best of {each} x {size} = {each * size}, or lower training.local_batch_size"
        yield config.problem("training.global_batch_size", why, fix)
    if job.mesh.degree("pp") > 1:
        why = "pipeline schedules run a fixed number of microbatches, but that of a replica group changes with the "
        why += "number of groups"
        fix = "set it to 1, or set fault_tolerance.enable = false"
        yield config.problem("parallelism.pipeline_parallel_degree", why, fix)
    if job.mesh.diverging_replicas > 1:
        dim = next(dim for dim in job.mesh.dims if dim.diverges and job.mesh.degrees[dim.name] > 1)
        why = "its replicas of the weights diverge, but fault tolerance needs the same weights in all replica groups"
        yield config.problem(dim.degree_key, why, "set it to 1, or set fault_tolerance.enable = false")
    if section.process_group == "nccl" and job.section(JobSection).device == "cpu":
        yield config.problem("fault_tolerance.process_group", "NCCL needs GPUs, but job.device is cpu", 'set it to "gloo"')
    if job.section(TrainingSection).enable_cpu_offload and section.process_group == "nccl":
        why = "NCCL cannot sum the gradients that training.enable_cpu_offload keeps on the host"
        yield config.problem("fault_tolerance.process_group", why, 'set it to "gloo"')
    if section.lighthouse is not None and not _is_address(section.lighthouse):
        yield config.problem("fault_tolerance.lighthouse", "is not of the form http://HOST:PORT", START_ONE)


def check_machine(context: JobContext[FaultToleranceSection]) -> Iterator[Problem]:
    """Return what this machine lacks to run a replica group."""
    address = lighthouse_of(context.section)
    key = "fault_tolerance.lighthouse"
    if not address:
        yield Problem(context.config.where(key), f"is not set, and neither is ${LIGHTHOUSE}", START_ONE)
    elif not _is_address(address):
        yield Problem(f"${LIGHTHOUSE} = {address}", "is not of the form http://HOST:PORT", START_ONE)
    problem = _torchft()
    if problem.health is not Health.OK:
        yield Problem(context.config.where("fault_tolerance.enable", True), problem.detail, problem.fix)
    import torch

    if context.section.process_group == "nccl" and not torch.cuda.is_available():
        yield context.config.problem("fault_tolerance.process_group", "this machine has no GPU", 'set it to "gloo"')
    host = own_host(address if _is_address(address) else "")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        why = f"the name of this machine does not resolve ({error}), and replica groups reach each other by name"
        fix = f"add {host} to /etc/hosts or to DNS, or set ${LOCAL_ADDRESS} (--local-addr of the launcher) to its address"
        yield Problem(f"host name {host!r}", why, fix)


def check_health(context: HealthContext) -> Iterator[CheckResult]:
    """Report whether torchft is installed."""
    yield _torchft()


def _torchft() -> CheckResult:
    try:
        found = version("torchft")
    except PackageNotFoundError:
        why = f"is not installed, so fault_tolerance.enable is refused; it has wheels for {PLATFORMS}"
        return CheckResult("torchft", Health.NOTE, why, "on such a machine: uv pip install torchft")
    return CheckResult("torchft", Health.OK, f"{found}: replica groups can train here")


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False


LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable: torchft's name for the address of the lighthouse."""
_LOOPBACK = "127.0.0.1"


def lighthouse_of(section: FaultToleranceSection) -> str:
    """Return the address of the lighthouse; empty if none is set."""
    return section.lighthouse or os.environ.get(LIGHTHOUSE, "")


def own_host(lighthouse: str) -> str:
    """Return the name or address at which the groups that meet at ``lighthouse`` reach this machine.

    It is :data:`~titan_core.toolkit.launching.LOCAL_ADDRESS` if that is set. At a lighthouse on loopback, all groups are on
    this machine. Otherwise it is the fully qualified name of this machine, which pods of another Kubernetes job need, or its
    host name if it has none.
    """
    if given := os.environ.get(LOCAL_ADDRESS):
        return given
    if is_loopback(urlsplit(lighthouse).hostname or ""):
        return _LOOPBACK
    name = socket.gethostname()
    full = socket.getfqdn(name)
    # Resolvers also answer "localhost", or a name made of the address.
    return full if full.startswith(f"{name.partition('.')[0]}.") else name
