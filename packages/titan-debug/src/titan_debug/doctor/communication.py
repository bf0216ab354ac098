"""Environment variables of NCCL and of torch's process groups that slow a job down, hide its failures, have no effect or
contradict each other. The lists follow NCCL's user guide and torch's ``ProcessGroupNCCL.hpp``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_core.api import CheckResult
from titan_core.toolkit.jobs import Health

_RENAMED = (
    "ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING", "DUMP_ON_TIMEOUT", "TRACE_BUFFER_SIZE",
    "USE_COMM_NONBLOCKING", "AVOID_RECORD_STREAMS", "HEARTBEAT_TIMEOUT_SEC", "ENABLE_MONITORING",
)  # fmt: skip
"""torch read ``NCCL_X`` before version 2.2, and reads ``TORCH_NCCL_X`` since."""
_DEBUG = ("VERSION", "WARN", "INFO", "TRACE")
_ON = ("1", "true", "yes", "y", "on")

_SWITCHED_OFF = {
    "NCCL_P2P_DISABLE": "GPUs of this machine exchange data through host memory instead of NVLink or PCIe",
    "NCCL_SHM_DISABLE": "GPUs of this machine may exchange data through the network",
    "NCCL_IB_DISABLE": "NCCL uses TCP instead of InfiniBand or RoCE",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
}
"""Variables that are 1 for debugging, and what that costs."""


def communication(environment: Mapping[str, str], adapters: Path) -> Iterator[CheckResult]:
    """Check the variables.

    Args:
        adapters: the kernel's folder of InfiniBand and RoCE adapters.
    """
    yield from _renamed(environment)
    for name, effect in _SWITCHED_OFF.items():
        if environment.get(name, "").lower() in _ON:
            yield CheckResult(name, Health.WARNING, f"is set: {effect}", "unset it, unless this machine needs it")
    yield from _logging(environment)
    yield from _failures(environment)
    yield from _adapters(environment, adapters)


def _renamed(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    for suffix in _RENAMED:
        old, new = f"NCCL_{suffix}", f"TORCH_NCCL_{suffix}"
        if old not in environment:
            continue
        if new in environment and environment[new] != environment[old]:
            why = f"is {environment[old]!r}, and {new} is {environment[new]!r}: they contradict each other"
        else:
            why = f"is deprecated: torch reads {new}, and may ignore this name"
        yield CheckResult(old, Health.WARNING, why, f"set {new} only")


def _logging(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    level = environment.get("NCCL_DEBUG", "").upper()
    if level and level not in _DEBUG:
        fix = f"set it to one of {', '.join(_DEBUG)}, or unset it"
        yield CheckResult("NCCL_DEBUG", Health.WARNING, f"{level!r} is not a level: NCCL ignores it", fix)
    elif level in ("INFO", "TRACE"):
        health = Health.WARNING if level == "TRACE" else Health.NOTE
        why = f"is {level}: every rank prints {'each call of NCCL' if level == 'TRACE' else 'how it connects'}"
        yield CheckResult("NCCL_DEBUG", health, why, "set it to WARN once the problem is found")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        why = "is DETAIL: torch compares every collective between all ranks before it runs, which takes milliseconds each"
        yield CheckResult("TORCH_DISTRIBUTED_DEBUG", Health.WARNING, why, "unset it once the problem is found")


def _failures(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check variables that decide what happens when a rank is lost."""
    handling = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if handling == "0":
        why = "is 0: when a rank is lost, the others wait forever instead of failing after comm.train_timeout_seconds"
        yield CheckResult("TORCH_NCCL_ASYNC_ERROR_HANDLING", Health.WARNING, why, "unset it")
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", "").lower() in _ON:
        why = "is set: the host waits for every collective, so communication does not overlap computation"
        yield CheckResult("TORCH_NCCL_BLOCKING_WAIT", Health.WARNING, why, "unset it")
    if environment.get("TORCH_NCCL_ENABLE_MONITORING", "").lower() in ("0", "false", "no", "n", "off"):
        why = "is off: a rank whose NCCL watchdog hangs is never ended"
        yield CheckResult("TORCH_NCCL_ENABLE_MONITORING", Health.NOTE, why, "unset it")
    if environment.get("TORCH_GLOO_LAZY_INIT") == "0":
        why = "is 0: every rank keeps a connection to every other (4,096 open files per process group at 4,096 ranks)"
        yield CheckResult("TORCH_GLOO_LAZY_INIT", Health.NOTE, why, "unset it for jobs of hundreds of ranks")


def _adapters(environment: Mapping[str, str], folder: Path) -> Iterator[CheckResult]:
    value = environment.get("NCCL_IB_HCA", "")
    if not value:
        return
    if environment.get("NCCL_IB_DISABLE", "").lower() in _ON:
        why = f"{value!r} has no effect, because NCCL_IB_DISABLE is set"
        yield CheckResult("NCCL_IB_HCA", Health.WARNING, why, "unset one of them")
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    exclude, names = value.startswith("^"), value.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    wanted = [name.strip().partition(":")[0] for name in names.split(",")]
    unknown = [name for name in wanted if not _selects(name, exact, present)]
    if unknown and not exclude:
        found = f"this machine has {', '.join(present)}" if present else "this machine has no adapter"
        why = f"{', '.join(map(repr, unknown))} selects no InfiniBand or RoCE adapter: {found}"
        health = Health.ERROR if len(unknown) == len(wanted) else Health.WARNING
        yield CheckResult("NCCL_IB_HCA", health, why, "set it to adapters of `ls /sys/class/infiniband`, or unset it")


def _selects(name: str, exact: bool, present: Sequence[str]) -> bool:
    return name in present if exact else any(adapter.startswith(name) for adapter in present)
