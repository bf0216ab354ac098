"""The names, interfaces and settings by which ranks on several machines find each other. Sends nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from titan_core.api import CheckResult, HealthContext
from titan_core.toolkit.jobs import Health
from titan_debug.doctor.communication import communication

_INFINIBAND = Path("/sys/class/infiniband")
_INTERFACES = Path("/sys/class/net")
_MASTER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


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
