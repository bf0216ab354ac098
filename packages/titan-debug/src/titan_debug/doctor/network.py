"""The names, interfaces and settings by which ranks on several machines find each other, and the variables of NCCL and of
torch's process groups that slow a job down, hide its failures, have no effect or contradict each other. Sends nothing. The
lists of variables follow NCCL's user guide and torch's ``ProcessGroupNCCL.hpp``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_core.api import CheckResult, Health, HealthContext

_INFINIBAND = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_MASTER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")

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


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check this machine's name, interfaces and the variables that NCCL, gloo and torch read."""
    yield host_name(os.environ, several_machines=bool(context.endpoint))
    interfaces = [name for _, name in socket.if_nameindex()]
    yield CheckResult("interfaces", Health.OK, ", ".join(interfaces))
    yield from choice(os.environ, _INTERFACES)
    yield from variables(os.environ, interfaces)
    yield from communication(os.environ, _INFINIBAND)
    yield from infiniband(_INFINIBAND)


def host_name(environment: Mapping[str, str], several_machines: bool) -> CheckResult:
    """Check that the host name resolves to an address that other machines can reach. gloo advertises that address unless
    ``GLOO_SOCKET_IFNAME`` is set."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        why = f"{name!r} does not resolve ({error.strerror or error}): ranks of several processes may wait for each other"
        return CheckResult("host name", Health.WARNING, why, "add it to /etc/hosts")
    shown = f"{name} ({', '.join(addresses)})"
    if "GLOO_SOCKET_IFNAME" not in environment and any(map(_is_loopback, addresses)):
        why = f"{shown}: resolves to this machine only, so ranks on other machines cannot connect to its ranks"
        fix = f"for jobs on several machines, give {name} its own address in /etc/hosts"
        if "127.0.1.1" in addresses:
            fix += " (Debian's installer adds the line with 127.0.1.1)"
        fix += ", or set GLOO_SOCKET_IFNAME; pass --rdzv-endpoint with an IP address"
        return CheckResult("host name", Health.WARNING if several_machines else Health.NOTE, why, fix)
    return CheckResult("host name", Health.OK, shown)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def choice(environment: Mapping[str, str], folder: Path) -> Iterator[CheckResult]:
    """Check which of several connected adapters NCCL and gloo use, and that those that they may use have one MTU.

    Args:
        folder: the kernel's folder of interfaces.
    """
    # Bridges and tunnels of containers have no device.
    physical = [path.name for path in sorted(folder.glob("*")) if (path / "device").exists()]
    connected = {name: _read(folder / name / "mtu") for name in physical if _read(folder / name / "operstate") == "up"}
    of_nccl, of_gloo = environment.get("NCCL_SOCKET_IFNAME"), environment.get("GLOO_SOCKET_IFNAME")
    unset = [name for name, value in (("NCCL_SOCKET_IFNAME", of_nccl), ("GLOO_SOCKET_IFNAME", of_gloo)) if not value]
    if len(connected) > 1 and unset:
        why = f"{', '.join(connected)} are connected, and {' and '.join(unset)} not set: machines may choose different ones"
        fix = f"for jobs on several machines, set {' and '.join(unset)} to the interface that connects them"
        yield CheckResult("choice of interface", Health.NOTE, why, fix)
    used = {name: mtu for name, mtu in connected.items() if not of_nccl or _selects_one(of_nccl, [name])}
    if len(set(used.values())) > 1:
        why = (
            f"{', '.join(f'{name} {mtu}' for name, mtu in used.items())}: large packets are lost where MTUs differ on a path"
        )
        fix = "use one MTU on all machines and switches: ping -M do -s MTU-28 HOST shows which size arrives"
        yield CheckResult("MTU", Health.NOTE, why, fix)
    if of_nccl and of_gloo and not any(_selects_one(of_nccl, [name]) for name in of_gloo.split(",")):
        why = f"NCCL_SOCKET_IFNAME = {of_nccl} and GLOO_SOCKET_IFNAME = {of_gloo} select different networks"
        yield CheckResult("choice of interface", Health.NOTE, why, "check that all machines are on both")


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the interface has just gone
        return ""


def variables(environment: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[CheckResult]:
    """Check environment variables that name interfaces, or that another launcher left behind."""
    of_nccl, of_gloo = environment.get("NCCL_SOCKET_IFNAME"), environment.get("GLOO_SOCKET_IFNAME")
    fix = f"set it to one of {', '.join(interfaces)}, or unset it"
    if of_nccl and not _selects_one(of_nccl, interfaces):
        why = f"{of_nccl!r} selects none of this machine's interfaces: jobs of several ranks fail to connect"
        yield CheckResult("NCCL_SOCKET_IFNAME", Health.ERROR, why, fix)
    unknown = [name for name in (of_gloo or "").split(",") if name and name not in interfaces]
    if unknown:  # unlike NCCL, gloo takes whole names and needs every one of them
        why = f"{', '.join(map(repr, unknown))} is not an interface of this machine: jobs of several ranks fail to start"
        yield CheckResult("GLOO_SOCKET_IFNAME", Health.ERROR, why, fix)
    left = [name for name in _MASTER if name in environment]
    if left and len(left) < len(_MASTER):
        why = f"{', '.join(left)} set, but not {', '.join(name for name in _MASTER if name not in left)}"
        fix = "unset them, or start titan through torchrun or --nproc-per-node"
        yield CheckResult("launcher variables", Health.WARNING, why, fix)


def _selects_one(value: str, interfaces: Sequence[str]) -> bool:
    """Whether a list of prefixes selects an interface. ``=`` requires whole names; ``^`` excludes (NCCL's user guide)."""
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    names = [name.strip() for name in value.split(",")]
    matches = [name for name in interfaces if (name in names if exact else any(name.startswith(prefix) for prefix in names))]
    return len(matches) < len(interfaces) if exclude else bool(matches)


def infiniband(folder: Path) -> Iterator[CheckResult]:
    """Check the ports of InfiniBand and RoCE adapters, and the limit on locked memory, which RDMA needs."""
    ports = sorted(folder.glob("*/ports/*/state"))
    if not ports:
        return
    states = {f"{port.parents[2].name}:{port.parent.name}": port.read_text().strip() for port in ports}
    down = [name for name, state in states.items() if not state.endswith("ACTIVE")]
    if down:
        why = f"{len(down)} of {len(states)} ports are not active ({', '.join(down)}): NCCL is slower, or fails to connect"
        yield CheckResult(
            "InfiniBand", Health.WARNING, why, "check cables and the subnet manager, or set NCCL_IB_HCA to the active ports"
        )
    else:
        yield CheckResult("InfiniBand", Health.OK, f"{len(states)} active ports")
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        why = f"{soft // 1024} KiB (ulimit -l): RDMA fails to register memory"
        yield CheckResult(
            "locked memory",
            Health.WARNING,
            why,
            "run `ulimit -l unlimited`, or start the container with --ulimit memlock=-1",
        )


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
