"""Joining and leaving the world: process group, device mesh, and the check that all ranks run the same job."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not exported to type checkers
    PrefixStore,
    Store,
    TCPStore,
)

from titan_core.api import JobMesh, MeshPlan, Problem, UserError, World
from titan_core.api.config.sections import CommSection, JobSection, TrainingSection
from titan_core.api.parallel.tree import gather_objects
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.loop.process_settings import only_this_thread_has_a_team
from titan_core.toolkit.device import attention_kernels, backend_for, choose_device
from titan_core.toolkit.launching import LISTENER
from titan_core.toolkit.open_files import allow_open_files
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.text import ranks
from titan_core.torch_private import forget_meshes, one_worker_per_gloo_group, process_groups, reset_compiler

_LAZY = "TORCH_GLOO_LAZY_INIT"
_MEANING = {**dict.fromkeys(("1", "t", "true", "y", "yes"), True), **dict.fromkeys(("0", "f", "false", "n", "no"), False)}
"""Of the values that torch takes for it, in lower case."""


@contextmanager
def join_world(job: AssembledJob) -> Iterator[World]:
    """Join the ranks that torchrun's environment describes (without it, a world of one), and leave them at the end.

    Raises:
        UserError: the device does not exist or is another rank's, or the ranks do not run the same job.
    """
    simulation = current_simulation()
    try:
        with (
            only_this_thread_has_a_team(),
            _joined(job) if simulation is None else simulation.join(job) as world,
            attention_kernels(world.device),
        ):
            yield world
    finally:  # nothing of this job may affect the next job of this process
        reset_compiler()  # otherwise it takes sizes that differ from those of this job for dynamic sizes
        forget_meshes()


@contextmanager
def _lazy_connections() -> Iterator[bool]:
    """Let gloo connect two ranks when they first exchange something, unless the user has decided otherwise, and yield
    whether it does: some 20 connections per rank, not one to every rank."""
    unset = _LAZY not in os.environ
    value = os.environ.setdefault(_LAZY, "1")
    if (lazy := _MEANING.get(value.lower())) is None:
        raise UserError.one(_LAZY, f"is {value!r}, neither on nor off", "set it to 1 or 0, or unset it")
    try:
        yield lazy
    finally:
        if unset:  # otherwise later groups of this process would not match those of processes without a job
            os.environ.pop(_LAZY, None)


@contextmanager
def _joined(job: AssembledJob) -> Iterator[World]:
    plan = job.mesh
    if dist.is_initialized():
        why = "has a process group already, and a job makes its own"
        raise UserError.one("this process", why, "call torch.distributed.destroy_process_group() before")
    device = choose_device(job.config.section(JobSection).device)
    timeout = timedelta(seconds=job.config.section(CommSection).init_timeout_seconds)
    with _lazy_connections() as lazy, one_worker_per_gloo_group():
        if (size := plan.world_size) > 1:
            first = os.environ.get("RANK", "0") == "0"  # may have the store, to which all ranks are connected
            allow_open_files(size * first + 2 * (size.bit_length() if lazy else size))
        shared, rank, world_size = _meet(timeout)
        store = store_of_job(shared, rank, world_size, timeout) if world_size > 1 else shared
        require_same_connections(store, rank, world_size, lazy)
        if device.type == "cuda" and world_size > 1:
            require_own_gpu(store, rank, world_size, device)
        # With a device, NCCL connects now, not in the first collective, and splits the groups of the mesh from this one.
        bound = device if device.type == "cuda" else None
        dist.init_process_group(
            backend_for(device), store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
        )
        failed = True
        try:
            # Before the mesh: ranks that disagree on its shape would deadlock while making it.
            require_same_job(job)
            mesh = JobMesh(plan, device.type, host_tensors=job.config.section(TrainingSection).enable_cpu_offload)
            yield World(rank, device, plan, mesh, _replica_group(plan))
            failed = False
        finally:
            # Without this about a quarter of gloo runs end in SIGABRT (torch 2.15). With NCCL it waits for the other ranks,
            # which may never come after an error; there the process ends without it.
            if not (failed and device.type == "cuda" and plan.world_size > 1):
                dist.destroy_process_group()


def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store that all ranks share, the rank, and the world size. torch's own rendezvous would listen on all
    addresses, and wait for all ranks without saying which are missing."""
    if "RANK" not in os.environ:
        # A world of one rank needs no network, and runs the same code as many ranks.
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # as above
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        why = f"is set without {' and '.join(missing)}"
        raise UserError.one("the environment variable RANK", why, "start the ranks with `titan launch` or torchrun")
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    listener = os.environ.pop(LISTENER, None)
    if listener is not None:
        os.set_inheritable(int(listener), False)
    hosts = listener is not None or (rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    store = TCPStore(
        os.environ["MASTER_ADDR"], port, world_size, is_master=hosts, timeout=timeout, wait_for_workers=False,
        multi_tenant=True, master_listen_fd=None if listener is None else int(listener),
    )  # fmt: skip
    if hosts and listener is None:
        _hosted[port] = store
    return store, rank, world_size


_hosted: dict[int, Store] = {}
"""The store that this process hosts as rank 0, by its port, where no launcher hosts one. It must outlive the job: the other
ranks may connect to it for the next job before this rank has left this one."""


def store_of_job(shared: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of the store for the job that the ranks are joining. The keys of an earlier job of the same processes
    would lead ranks to the addresses of its connections, where nobody answers.

    Rank 0 names the part. A rank cannot tell a new name from that of an earlier job, so each rank sends a nonce.

    Raises:
        DistStoreError: the other ranks did not come in time. That of rank 0 names those.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        asked = [f"joining/{other}" for other in range(1, world_size)]
        try:
            words = shared.multi_get(asked)
        except dist.DistStoreError:
            if absent := [other for other, key in enumerate(asked, 1) if not shared.check([key])]:
                late = f"not here after {timeout.total_seconds():g} s (comm.init_timeout_seconds)"
                raise dist.DistStoreError(f"{ranks(absent)}: {late}") from None
            raise
        for key in asked:
            shared.delete_key(key)
        for word in words:
            shared.set(f"part/{word.decode()}", own)
        return PrefixStore(f"job/{own}", shared)
    shared.set(f"joining/{rank}", own)
    part = shared.get(f"part/{own}").decode()
    shared.delete_key(f"part/{own}")
    return PrefixStore(f"job/{part}", shared)


def require_same_connections(store: Store, rank: int, world_size: int, lazy: bool) -> None:
    """Check that gloo connects all ranks lazily, or none, before it does.

    A rank that connects at once reads an identifier for each pair, which one that connects lazily does not publish: it
    reads an empty list at its rank, and crashes without a message (gloo's ``tcp/context.cc``, up to torch 2.15).

    Raises:
        UserError: ranks differ. Raised on every rank.
    """
    if world_size == 1:
        return
    having = _ranks_by_value(store, rank, world_size, "lazy", str(lazy))
    if len(having) > 1:
        why = f"is on for {ranks(having['True'])} and off for {ranks(having['False'])}, which cannot connect"
        fix = "give it the same value on all ranks, or unset it"
        _raise_together(store, rank, world_size, [Problem(_LAZY, why, fix)])


def require_own_gpu(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """Check that no two ranks use the same GPU, before NCCL, which fails without naming them.

    Raises:
        UserError: ranks share a GPU. Raised on every rank, with one problem per GPU.
    """
    own = f"GPU {torch.cuda.get_device_properties(device).uuid} of {socket.gethostname()}"
    users = _ranks_by_value(store, rank, world_size, "gpu", own)
    shared = {gpu: using for gpu, using in users.items() if len(using) > 1}
    if shared:
        fix = "start at most one rank per GPU, and give each rank its own in CUDA_VISIBLE_DEVICES or LOCAL_RANK"
        problems = [Problem(ranks(using), f"use the same GPU: {gpu}", fix) for gpu, using in shared.items()]
        _raise_together(store, rank, world_size, problems)


def _ranks_by_value(store: Store, rank: int, world_size: int, name: str, value: str) -> dict[str, list[int]]:
    """Return which ranks have which value, on every rank. There is no process group yet."""
    store.set(f"{name}/{rank}", value)
    if rank == 0:
        having: dict[str, list[int]] = {}
        for its, found in enumerate(store.multi_get([f"{name}/{other}" for other in range(world_size)])):
            having.setdefault(found.decode(), []).append(its)
        store.set(name, json.dumps(having))
    result: dict[str, list[int]] = json.loads(store.get(name))
    return result


def _raise_together(store: Store, rank: int, world_size: int, problems: list[Problem]) -> NoReturn:
    """Raise on every rank. Rank 0 may have the store, so it waits until the others have read why."""
    store.set(f"refused/{rank}", "")
    if rank == 0:
        store.wait([f"refused/{other}" for other in range(world_size)])
    raise UserError(*problems)


def _replica_group(plan: MeshPlan) -> dist.ProcessGroup | None:
    """Return the group of the ranks that train the same diverging replica of the weights as this rank."""
    if plan.diverging_replicas == 1:
        return None
    mine = next(replica for replica in plan.replicas if dist.get_rank() in replica)
    for group in process_groups():  # a mesh divides all ranks alike: every rank finds a group, or none does
        if dist.get_process_group_ranks(group) == mine and dist.get_backend_config(group) == dist.get_backend_config():
            return group
    made, _ = dist.new_subgroups_by_enumeration(plan.replicas)
    assert isinstance(made, dist.ProcessGroup)  # every rank is in a group
    return made


def require_same_job(job: AssembledJob) -> None:
    """Compare the resolved config and the plugins of all ranks.

    Raises:
        UserError: a rank differs from rank 0. Raised on every rank, with one problem per rank that differs.
    """
    digests = gather_objects(job.digest())
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return
    identities = gather_objects(job.identity())
    raise UserError(
        *(
            Problem(
                f"rank {rank}",
                f"its job differs from that of rank 0 in {_differences_of(identities[0], identities[rank])}",
                "start all ranks with the same config and the same packages",
            )
            for rank in different
        )
    )


def _differences_of(first: object, here: object) -> str:
    """Return the differences. Secrets are compared but not shown."""
    return ", ".join(_differences(first, here)) or "a secret (the value of a key such as a password, or within an address)"


def _differences(first: object, here: object, path: str = "") -> list[str]:
    if isinstance(first, dict) and isinstance(here, dict):
        keys = dict.fromkeys((*first, *here))
        return [line for key in keys for line in _differences(first.get(key), here.get(key), f"{path}.{key}".lstrip("."))]
    return [] if first == here else [f"{path} ({first!r} on rank 0, {here!r} here)"]
