"""The names, interfaces and settings by which ranks on several machines find each other. Sends nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_core.api.health import CheckResult, Health, HealthContext

_INFINIBAND = Path("/sys/class/infiniband")
_MASTER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check this machine's name, interfaces and the variables that NCCL, gloo and torch read."""
    yield _host_name()
    interfaces = [name for _, name in socket.if_nameindex()]
    yield CheckResult("interfaces", Health.OK, ", ".join(interfaces))
    yield from variables(os.environ, interfaces)
    yield from infiniband(_INFINIBAND)


def _host_name() -> CheckResult:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        why = f"{name!r} does not resolve ({error.strerror or error}): ranks of several processes may wait for each other"
        return CheckResult("host name", Health.WARNING, why, "add it to /etc/hosts")
    shown = f"{name} ({', '.join(addresses)})"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        why = f"{shown}: resolves to this machine only, so other machines cannot reach ranks by it"
        return CheckResult(
            "host name", Health.NOTE, why, "for jobs on several machines, pass --rdzv-endpoint with an IP address"
        )
    return CheckResult("host name", Health.OK, shown)


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
