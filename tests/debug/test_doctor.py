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

from titan_core.api.errors import UserError
from titan_core.api.health import CheckResult, Health, HealthCheck, HealthContext
from titan_core.api.ref import Ref
from titan_core.cli.main import main
from titan_core.plugins.discovery import discover
from titan_core.plugins.registry import Registry
from titan_debug.cli.doctor import _results
from titan_debug.doctor.gpus import gpus
from titan_debug.doctor.machine import Machine, cgroup_limit, cpu_quota, disk, file_system, limits, shared_memory
from titan_debug.doctor.network import infiniband, variables
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
    context = HealthContext(Registry(discover()), Path("outputs"), "")
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
