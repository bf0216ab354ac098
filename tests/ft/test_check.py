"""What a replica group cannot be is refused before anything is built, and without torch."""

from __future__ import annotations

import socket

import pytest

from harness.replicas import SHARED
from titan_core.api import Health, HealthContext, UserError
from titan_ft import check as check_module
from titan_ft.check import LIGHTHOUSE, check_health
from titan_testing.jobs import make_job

ON: dict[str, object] = {**SHARED, "fault_tolerance.enable": "true"}


@pytest.mark.parametrize(
    ("settings", "world", "refused"),
    [
        ({"fault_tolerance.replica_id": 2}, 1, "replica_id = 2: must be below fault_tolerance.group_size = 2"),
        ({"fault_tolerance.min_replica_size": 3}, 1, "fault_tolerance.min_replica_size = 3: exceeds"),
        (
            {"training.local_batch_size": 4},
            1,
            "training.global_batch_size = 4: gives each replica group 1 microbatch(es) of 4 sequences to share with "
            "the other groups, but there are 2; set it to a multiple of 4, best of 4 x 2 = 8, or lower",
        ),
        ({"parallelism.pipeline_parallel_degree": 2}, 2, "parallelism.pipeline_parallel_degree = 2: pipeline schedules run"),
        (
            {"fault_tolerance.process_group": "nccl", "job.device": "cpu"},
            1,
            'fault_tolerance.process_group = "nccl": NCCL needs GPUs, but job.device is cpu; set it to "gloo"',
        ),
        ({"fault_tolerance.process_group": "mpi"}, 1, "fault_tolerance.process_group"),
        ({"fault_tolerance.lighthouse": "somewhere:29510"}, 1, "is not of the form http://HOST:PORT"),
        ({"fault_tolerance.lighthouse": "http://host:port"}, 1, "is not of the form http://HOST:PORT"),
        ({"fault_tolerance.semi_sync_method": "diloco"}, 1, "fault_tolerance.semi_sync_method"),
    ],
)  # fmt: skip
def test_refused(settings: dict[str, object], world: int, refused: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job("tiny", {**ON, **settings}, world)
    assert refused in str(caught.value)


def test_it_is_off_by_default() -> None:
    assert "fault_tolerance" not in [transform.name for transform in make_job("tiny", SHARED, 1).transforms]


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (
            None,
            f"fault_tolerance.lighthouse: is not set, and neither is ${LIGHTHOUSE}; start one with `titan ft lighthouse`",
        ),
        ("nowhere", f"${LIGHTHOUSE} = nowhere: is not of the form http://HOST:PORT"),
    ],
)
def test_a_job_starts_only_with_a_lighthouse(given: str | None, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    if given is not None:
        monkeypatch.setenv(LIGHTHOUSE, given)
    with pytest.raises(UserError) as caught:
        make_job("tiny", ON, 1).require_hardware()
    assert refused in str(caught.value)


def test_a_machine_without_torchft_or_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise check_module.PackageNotFoundError(name)

    monkeypatch.setenv(LIGHTHOUSE, "http://10.0.0.1:29510")
    make_job("tiny", ON, 1).require_hardware()
    monkeypatch.setattr(check_module, "version", missing)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(UserError) as caught:
        make_job("tiny", ON, 1).require_hardware()
    torchft, host = caught.value.problems
    assert "fault_tolerance.enable = true: is not installed" in str(torchft) and "uv pip install torchft" in str(torchft)
    assert "host name 'no-such-host.invalid': the name of this machine does not resolve" in str(host)


def test_doctor_reports_torchft(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def missing(name: str) -> str:
        raise check_module.PackageNotFoundError(name)

    context: HealthContext = None  # type: ignore[assignment]  # the check needs nothing of it
    (found,) = check_health(context)
    assert found.health is Health.OK and "replica groups can train here" in found.detail
    monkeypatch.setattr(check_module, "version", missing)
    (found,) = check_health(context)
    assert found.health is Health.NOTE and found.fix
