"""Cores, memory, shared memory, limits of processes and disk space, also those of a container."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titan_core.api import CheckResult, Health, HealthContext

GIB = 2**30
_LEAST_SHARED = GIB
"""NCCL's transfers within a machine and worker processes of data loaders need shared memory; Docker's default is 64 MiB."""
_LEAST_FILES = 4096
"""Open files per process. Checkpoints, sockets to other ranks and datasets of many files add up."""
_MOST_FILES = 65536
"""Open files per process that suffice for any job."""
_LEAST_DISK = 10 * GIB
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")


@dataclass(frozen=True)
class Machine:
    """The files through which the kernel reports limits; tests pass folders of their own."""

    cgroup: Path = Path("/sys/fs/cgroup")
    shared_memory: Path = Path("/dev/shm")
    mounts: Path = Path("/proc/self/mounts")


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check everything that a process can run out of."""
    machine = Machine()
    yield from _memory(machine)
    yield from shared_memory(machine)
    yield from limits()
    yield from disk(context.folder, machine)


def _memory(machine: Machine) -> Iterator[CheckResult]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = cgroup_limit(machine.cgroup, "memory.max")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(machine.cgroup)
    shown = f"{cores} cores" + (f", of which the container may use {quota:g}" if quota and quota < cores else "")
    yield CheckResult("processor", Health.OK, shown)
    shown = f"{total / GIB:.1f} GiB"
    if allowed and allowed < total:
        shown += f", of which the container may use {allowed / GIB:.1f} GiB"
    yield CheckResult("memory", Health.OK, shown)


def cgroup_limit(folder: Path, name: str) -> int | None:
    """Return a limit of this process's container, or ``None`` if it has none. Reads cgroup version 2."""
    try:
        text = (folder / name).read_text().strip()
    except OSError:  # not in a container, or cgroup version 1
        return None
    return int(text) if text.isdigit() else None


def cpu_quota(folder: Path) -> float | None:
    """Return the number of cores that the container may use, or ``None`` if it has no limit."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def shared_memory(machine: Machine) -> Iterator[CheckResult]:
    """Check the size of ``/dev/shm``."""
    if not machine.shared_memory.is_dir():
        if sys.platform == "linux":
            why = f"{machine.shared_memory} does not exist: NCCL and worker processes fail"
            yield CheckResult("shared memory", Health.WARNING, why, "mount a tmpfs there")
        return
    size = shutil.disk_usage(machine.shared_memory)
    shown = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {machine.shared_memory}"
    if size.free >= _LEAST_SHARED:
        yield CheckResult("shared memory", Health.OK, shown)
    else:
        why = f"{shown}: NCCL within a machine and data.num_workers > 0 may fail"
        yield CheckResult("shared memory", Health.WARNING, why, "start the container with --shm-size=16g or --ipc=host")


def limits() -> Iterator[CheckResult]:
    """Check the limits on open files and on core dumps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        yield CheckResult("open files", Health.OK, "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} per process")
    else:
        if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES:
            fix = f"run `ulimit -n {_MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)}` before titan"
        else:
            fix = (
                f"an administrator must raise the hard limit of {hard}: in /etc/security/limits.conf, in the job scheduler, "
            )
            fix += f"or of a container with --ulimit nofile={_MOST_FILES}"
        why = f"{soft} per process (ulimit -n): jobs of many ranks or files fail with 'too many open files'"
        yield CheckResult("open files", Health.WARNING, why, fix)
    core_size, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if core_size not in (0, resource.RLIM_INFINITY):
        why = f"dumps are cut at {core_size} bytes (ulimit -c)"
        yield CheckResult("core dumps", Health.NOTE, why, "run `ulimit -c unlimited`, or 0 to write none")


def disk(folder: Path, machine: Machine) -> Iterator[CheckResult]:
    """Check the disk that runs are written to."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        why = f"{existing} is a file: no run can be written below it"
        yield CheckResult("disk", Health.ERROR, why, "choose another folder (--folder, job.dump_folder)")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written: no run can start there"
        yield CheckResult("disk", Health.ERROR, why, "change its permissions, or choose another job.dump_folder")
        return
    size = shutil.disk_usage(existing)
    kind = file_system(existing, machine.mounts)
    shown = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {existing}" + (f" ({kind})" if kind else "")
    if size.free < _LEAST_DISK:
        # Float32 weights and Adam's two moments.
        why = f"{shown}: a checkpoint takes 12 bytes per parameter, 11 GiB for a model of 1 billion"
        fix = "free space, choose another job.dump_folder, or keep fewer (checkpoint.keep_latest_k)"
        yield CheckResult("disk", Health.WARNING, why, fix)
    else:
        yield CheckResult("disk", Health.OK, shown)
    if kind in _NETWORK_FILE_SYSTEMS:
        why = "is a network file system: it must support file locks (flock), which keep two jobs out of one directory"
        yield CheckResult("disk", Health.NOTE, f"{existing} {why}")


def file_system(folder: Path, mounts: Path) -> str:
    """Return the type of the file system that contains ``folder``, or an empty string if it is unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # not Linux
        return ""
    found = [fields for line in lines if len(fields := line.split()) >= 3 and folder.is_relative_to(_unescape(fields[1]))]
    # The longest mount point contains the folder; of equal ones, the last covers the others.
    return max(enumerate(found), key=lambda entry: (len(entry[1][1]), entry[0]))[1][2] if found else ""


def _unescape(mount_point: str) -> str:
    """Decode the octal escapes of ``/proc/self/mounts``."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\134", "\\")):
        mount_point = mount_point.replace(code, character)
    return mount_point
