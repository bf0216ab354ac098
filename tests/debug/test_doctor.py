"""``titan doctor`` reports what does not work, with the consequence and the fix."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_core.api import CheckResult, Health, HealthCheck, HealthContext, Ref, UserError
from titan_core.cli.main import main
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Components
from titan_debug.cli.doctor import _results
from titan_debug.doctor.gpus import gpus
from titan_debug.doctor.machine import Machine, cgroup_limit, cpu_quota, disk, file_system, limits, shared_memory
from titan_debug.doctor.network import choice, communication, host_name, infiniband, variables
from titan_debug.doctor.software import compilers, torch_build


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


def nvml(**changes: Any) -> Any:
    """Return a stand-in for ``pynvml`` on a machine with two healthy GPUs, with ``changes`` to what its functions return."""

    def returns(value: Any) -> Any:
        def function(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return function

    healthy = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetCudaDriverVersion_v2": 13020,
        "nvmlSystemGetDriverVersion": "590.10",
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=2**20),
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "NVIDIA H100",
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetMigMode": NotSupported(),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
        "nvmlDeviceGetP2PStatus": 0,
    }
    constants = {
        "NVML_COMPUTEMODE_PROHIBITED": 2, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0,
        "nvmlClocksThrottleReasonHwSlowdown": 8, "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "nvmlClocksThrottleReasonSwThermalSlowdown": 32, "NVML_P2P_CAPS_INDEX_NVLINK": 2, "NVML_P2P_STATUS_OK": 0,
    }  # fmt: skip
    errors = {"NVMLError": NVMLError, "NVMLError_NotSupported": NotSupported}
    errors |= {f"NVMLError_{name}": type(name, (NVMLError,), {}) for name in ("NoPermission", "FunctionNotFound")}
    return SimpleNamespace(**{name: returns(value) for name, value in (healthy | changes).items()}, **constants, **errors)


def flaws(results: Iterable[CheckResult]) -> list[str]:
    """Return the results that are not fine, one line each. Warnings and errors must say what to do."""
    found = [result for result in results if result.health is not Health.OK]
    assert all(result.fix for result in found if result.health is not Health.NOTE)
    return [f"{result.health} {result.subject}: {result.detail}; {result.fix}" for result in found]


def test_healthy_gpus_have_no_flaws() -> None:
    results = list(gpus(nvml(), "13.2", {}, present=True))
    assert not flaws(results)
    assert [result.subject for result in results] == ["NVIDIA driver", "GPU 0", "GPU 1"]
    assert "NVIDIA H100, 80.0 GiB, compute capability 9.0" in results[1].detail


@pytest.mark.parametrize(
    ("changes", "environment", "flaw"),
    [
        ({"nvmlSystemGetCudaDriverVersion_v2": 12080}, {}, "error NVIDIA driver: .* torch is built for CUDA 13.2: .*update"),
        ({"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**34, used=2**33)}, {}, "note GPU 0: 8.0 GiB .* in use"),
        ({"nvmlDeviceGetComputeMode": 2}, {}, "error GPU 0: its compute mode is 'prohibited'"),
        ({"nvmlDeviceGetMigMode": (1, 1)}, {}, "note GPU 0: is divided by MIG"),
        ({"nvmlDeviceGetTotalEccErrors": 3}, {}, "error GPU 0: 3 uncorrectable memory errors"),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": 64}, {}, "warning GPU 0: its clock is reduced"),
        ({"nvmlDeviceGetP2PStatus": 5}, {}, "note NVLink: GPUs 0 and 1 are not connected by NVLink"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "warning CUDA_VISIBLE_DEVICES: .* none of the 2 GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "warning CUDA_VISIBLE_DEVICES: .* none of the 2 GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "0,2,1"}, "error CUDA_VISIBLE_DEVICES: .* there is no GPU 2: CUDA ignores it and all"),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, "note CUDA_VISIBLE_DEVICES: selects 1 of 2"),
    ],
)
def test_flaws_of_gpus(changes: dict[str, Any], environment: dict[str, str], flaw: str) -> None:
    first, *_ = flaws(gpus(nvml(**changes), "13.2", environment, present=True))
    assert re.match(flaw, first), first


def test_a_gpu_without_a_driver_is_an_error_and_no_gpu_is_a_note() -> None:
    broken = nvml(nvmlInit=NVMLError("driver not loaded"))
    (flaw,) = flaws(gpus(broken, "13.2", {}, present=True))
    assert flaw.startswith("error NVIDIA driver: the machine has an NVIDIA GPU")
    (flaw,) = flaws(gpus(broken, "13.2", {}, present=False))
    assert flaw.startswith("note GPU: no NVIDIA GPU")


def test_torch_for_the_cpu_on_a_machine_with_gpus_is_a_warning() -> None:
    (flaw,) = flaws(gpus(nvml(), None, {}, present=True))
    assert flaw.startswith("warning NVIDIA driver") and "torch is built for the CPU only" in flaw


@pytest.mark.full
def test_torchs_version_is_read_without_importing_torch() -> None:
    code = "import sys; from titan_debug.doctor.software import torch_build; b = torch_build()\n"
    code += "assert 'torch' not in sys.modules; import torch\n"
    code += "assert (b.version, b.cuda) == (torch.__version__, torch.version.cuda)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch_build() is not None


def test_missing_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = flaws(compilers({"CXX": "nothing++"}, triton=True))
    assert found[0].startswith("warning C++ compiler: CXX = nothing++ is not a program: compile.enable = true fails")
    assert any(line.startswith("warning C compiler") for line in found)
    (tmp_path / "file").touch()
    readonly = tmp_path / "readonly"
    readonly.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != readonly)
    assert "cannot be written" in flaws(compilers({"TORCHINDUCTOR_CACHE_DIR": str(readonly / "below")}, triton=False))[-1]


def test_limits_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_limit(tmp_path, "memory.max") == 2**30
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_limit(tmp_path, "memory.max") is None
    assert cpu_quota(tmp_path) is None


def test_small_shared_memory_and_full_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=2**26, used=0, free=2**26))
    assert "--shm-size" in flaws(shared_memory(Machine(shared_memory=tmp_path)))[0]
    assert "a checkpoint takes 12 bytes per parameter" in flaws(disk(tmp_path / "new" / "outputs", Machine()))[0]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outputs"
    file.touch()
    assert flaws(disk(file / "run", Machine()))[0].startswith(f"error disk: {file} is a file")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert flaws(disk(tmp_path, Machine()))[0].startswith(f"error disk: {tmp_path} cannot be written")


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "a / ext4 rw 0 0\nb /data nfs4 rw 0 0\nc /data/my\\040disk xfs rw 0 0\nd /data/my\\040disk ext4 rw 0 0\n"
    )
    kinds = [file_system(Path(path), mounts) for path in ("/home", "/data", "/data/other", "/data/my disk/runs")]
    assert kinds == ["ext4", "nfs4", "nfs4", "ext4"]


@pytest.mark.parametrize(
    ("value", "selects"),
    [
        ("eth", True), ("eth0", True), ("=eth", False), ("=eth0", True), ("ib", False), ("ib,eth", True), ("^lo", True),
        ("^lo,eth", False),
    ],
)  # fmt: skip
def test_interfaces_that_nccl_may_use(value: str, selects: bool) -> None:
    assert bool(flaws(variables({"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"]))) is not selects


@pytest.mark.parametrize(
    ("value", "works"), [("eth0", True), ("lo,eth0", True), ("eth", False), ("lo,ib0", False), ("^lo", False)]
)
def test_interfaces_that_gloo_may_use(value: str, works: bool) -> None:
    assert bool(flaws(variables({"GLOO_SOCKET_IFNAME": value}, ["lo", "eth0"]))) is not works


@pytest.mark.parametrize(
    ("hard", "fix"), [(64, "nofile=65536"), (8192, "ulimit -n 8192`"), (resource.RLIM_INFINITY, "ulimit -n 65536`")]
)
def test_the_fix_for_few_open_files_can_be_done(hard: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, hard) if which == resource.RLIMIT_NOFILE else (0, 0))
    (result,) = limits()
    assert fix in result.fix


def test_variables_left_by_a_launcher() -> None:
    (flaw,) = flaws(variables({"RANK": "0"}, ["lo"]))
    assert flaw.startswith("warning launcher variables: RANK set, but not MASTER_ADDR, MASTER_PORT, WORLD_SIZE")
    assert not flaws(variables(dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "1"), ["lo"]))


def test_infiniband_ports(tmp_path: Path) -> None:
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / adapter / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert "1 of 2 ports are not active (mlx5_1:1)" in flaws(infiniband(tmp_path))[0]


def resolving_to(*addresses: str) -> Any:
    """Return a stand-in for ``socket.getaddrinfo`` that returns ``addresses``."""
    return lambda name, port: [(2, 1, 6, "", (address, 0)) for address in addresses]


@pytest.mark.parametrize(
    ("addresses", "environment", "several", "flaw"),
    [
        (["10.0.0.5"], {}, True, ""),
        (["127.0.1.1"], {}, True, "warning host name: .*127.0.1.1.*Debian's installer.*GLOO_SOCKET_IFNAME"),
        (["127.0.1.1"], {}, False, "note host name: .*Debian's installer"),
        (["127.0.0.1", "::1"], {}, True, "warning host name: .*give node7 its own address in /etc/hosts, or"),
        (["10.0.0.5", "127.0.1.1"], {}, True, "warning host name: .*resolves to this machine only"),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, True, ""),
    ],
)
def test_a_host_name_that_other_machines_cannot_reach(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], environment: dict[str, str], several: bool, flaw: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("socket.getaddrinfo", resolving_to(*addresses))
    found = flaws([host_name(environment, several)])
    assert len(found) == bool(flaw)
    assert not flaw or re.match(flaw, found[0]), found


@pytest.mark.parametrize(
    ("interfaces", "chosen", "expected"),
    [
        ({"eth0": "1500"}, {}, []),
        ({"eth0": "1500", "docker0 virtual": "1500"}, {}, []),
        ({"eth0": "1500", "eth1 down": "1500"}, {}, []),
        ({"eth0": "1500", "eth1": "1500"}, {}, ["choice of interface: eth0, eth1 are connected, and NCCL_SOCKET_IFNAME a"]),
        ({"eth0": "1500", "eth1": "1500"}, {"NCCL": "eth1"}, ["choice of interface: .* and GLOO_SOCKET_IFNAME not set"]),
        ({"eth0": "1500", "eth1": "9000"}, {"NCCL": "eth", "GLOO": "eth0"}, ["MTU: eth0 1500, eth1 9000"]),
        ({"eth0": "1500", "eth1": "9000"}, {"NCCL": "eth1", "GLOO": "eth1"}, []),
        ({"eth0": "1500", "eth1": "1500"}, {"NCCL": "eth1", "GLOO": "eth0"}, ["choice of interface: .*different networks"]),
    ],
)  # fmt: skip
def test_several_interfaces(tmp_path: Path, interfaces: dict[str, str], chosen: dict[str, str], expected: list[str]) -> None:
    for entry, mtu in interfaces.items():
        name, _, kind = entry.partition(" ")
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mtu").write_text(f"{mtu}\n")
        (folder / "operstate").write_text("down\n" if kind == "down" else "up\n")
        if kind != "virtual":
            (folder / "device").mkdir()
    found = flaws(choice({f"{library}_SOCKET_IFNAME": name for library, name in chosen.items()}, tmp_path))
    assert len(found) == len(expected), found
    assert all(re.match(f"note {pattern}", line) for pattern, line in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("environment", "flaw"),
    [
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "warning NCCL_ASYNC_ERROR_HANDLING: is deprecated: .*TORCH_NCCL_ASYNC_ERROR"),
        ({"NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_BLOCKING_WAIT": "no"}, "warning NCCL_BLOCKING_WAIT: .*contradict"),
        ({"NCCL_DEBUG": "TRACE"}, "warning NCCL_DEBUG: is TRACE"),
        ({"NCCL_DEBUG": "info"}, "note NCCL_DEBUG: is INFO"),
        ({"NCCL_DEBUG": "LOUD"}, "warning NCCL_DEBUG: 'LOUD' is not a level"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning NCCL_P2P_DISABLE: is set: GPUs of this machine"),
        ({"NCCL_SHM_DISABLE": "1"}, "warning NCCL_SHM_DISABLE"),
        ({"NCCL_IB_DISABLE": "1"}, "warning NCCL_IB_DISABLE: is set: NCCL uses TCP"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning CUDA_LAUNCH_BLOCKING"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warning TORCH_DISTRIBUTED_DEBUG: is DETAIL"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning TORCH_NCCL_ASYNC_ERROR_HANDLING: .* wait forever"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "warning TORCH_NCCL_BLOCKING_WAIT: .*overlap"),
        ({"TORCH_NCCL_ENABLE_MONITORING": "false"}, "note TORCH_NCCL_ENABLE_MONITORING"),
        ({"TORCH_GLOO_LAZY_INIT": "0"}, "note TORCH_GLOO_LAZY_INIT: .*every rank"),
        ({"NCCL_IB_HCA": "mlx4"}, "error NCCL_IB_HCA: 'mlx4' selects no .*mlx5_0, mlx5_1"),
        ({"NCCL_IB_HCA": "=mlx5"}, "error NCCL_IB_HCA: 'mlx5' selects no"),
        ({"NCCL_IB_HCA": "mlx5_0:1,mlx5_9:1"}, "warning NCCL_IB_HCA: 'mlx5_9' selects no"),
    ],
    ids=str,
)  # fmt: skip
def test_variables_of_communication(tmp_path: Path, environment: dict[str, str], flaw: str) -> None:
    for adapter in ("mlx5_0", "mlx5_1"):
        (tmp_path / adapter).mkdir()
    (found,) = flaws(communication(environment, tmp_path))
    assert re.match(flaw, found), found


@pytest.mark.parametrize(
    "environment",
    [
        {}, {"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "0"}, {"NCCL_IB_HCA": "mlx5"}, {"NCCL_IB_HCA": "^mlx5_9"},
        {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_variables_that_are_fine(tmp_path: Path, environment: dict[str, str]) -> None:
    for adapter in ("mlx5_0", "mlx5_1"):
        (tmp_path / adapter).mkdir()
    assert not flaws(communication(environment, tmp_path))


def test_adapters_that_are_switched_off_or_missing(tmp_path: Path) -> None:
    off, useless, missing = flaws(communication({"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_DISABLE": "1"}, tmp_path / "none"))
    assert off.startswith("warning NCCL_IB_DISABLE") and "no effect, because NCCL_IB_DISABLE" in useless
    assert missing.startswith("error NCCL_IB_HCA") and "this machine has no adapter" in missing


@pytest.mark.parametrize("limit", [64 * 1024, resource.RLIM_INFINITY])
def test_rdma_needs_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE")
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    found = flaws(infiniband(tmp_path))
    assert [line.partition(":")[0] for line in found] == (["warning locked memory"] if limit > 0 else [])


def raising_check(context: HealthContext) -> Iterable[CheckResult]:
    yield CheckResult("first", Health.OK, "fine")
    raise UserError.one("somewhere", "something", "do this")


def failing_check(context: HealthContext) -> Iterable[CheckResult]:
    yield CheckResult("first", Health.OK, "fine")
    raise PermissionError(13, "Permission denied", "/sys/secret")


@pytest.mark.parametrize(
    ("name", "detail", "fix"),
    [
        ("raising_check", "somewhere: something", "do this"),
        ("failing_check", "the check raised PermissionError: .* '/sys/secret'", "update its plugin .*TITAN_TRACEBACK.*"),
    ],
)
def test_a_check_that_raises_is_a_result(name: str, detail: str, fix: str) -> None:
    context = HealthContext(Components(discover()), Path("outputs"), "")
    results = list(_results(HealthCheck(name="odd", summary="", check=Ref(f"{__name__}:{name}")), context))
    assert [result.health for result in results] == [Health.OK, Health.ERROR]
    assert re.fullmatch(detail, results[1].detail)
    assert re.fullmatch(fix, results[1].fix)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main(["doctor", "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert status == any(line.startswith("  FAIL") for line in lines)
    assert {"plugins", "software", "GPUs", "machine", "network"} <= set(lines)
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == status
    found = json.loads(capsys.readouterr().out)
    assert {check["group"] for check in found["checks"]} >= {"plugins", "software", "GPUs", "machine", "network"}
    assert found["errors"] == sum(check["health"] == "error" for check in found["checks"])


@pytest.mark.full
def test_computing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--full", "--json"])
    found = {check["subject"]: check["health"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["matmul on cpu"] == found["torch.compile for cpu"] == found["all-reduce with gloo"] == "ok"


def test_doctor_imports_no_torch() -> None:
    code = "import sys; from titan_core.cli.main import main; main(['doctor']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
