"""Replica groups together train exactly what one group alone does, whatever happens to them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch.distributed import AllreduceOptions

from harness.replicas import SHARED, Leave, Script, join_group, lighthouse, run_group, stores, wait_for
from harness.small_gpt import small
from titan_core.api import RunStopped, UserError, hookimpl
from titan_ft import groups as groups_module, step as step_module
from titan_ft.groups import MOST_COPIES
from titan_ft.state_transport import StateTransport
from titan_ft.torchft_api import process_group
from titan_testing import PATIENCE
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import RunRecord, make_job, run_job, run_recipe

COUNTED = small(blocks=4, counts=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The same job without fault tolerance."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_recipe("tiny", {**SHARED, "job.dump_folder": folder}, weights=True)


def require_same_run(record: RunRecord, alone: RunRecord, first: int = 1) -> None:
    """Check the steps from ``first`` on, and the weights at the end."""
    assert len(record.losses) == len(alone.losses) - first + 1
    torch.testing.assert_close(torch.tensor(record.losses), torch.tensor(alone.losses[first - 1 :]), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.tensor(record.grad_norms), torch.tensor(alone.grad_norms[first - 1 :]), rtol=1e-5, atol=0
    )
    assert record.learning_rates == alone.learning_rates[first - 1 :]
    assert record.targets == alone.targets[first - 1 :]
    for name, weight in alone.final.items():
        torch.testing.assert_close(record.final[name], weight, rtol=1e-4, atol=1e-6)


def require_equal_weights(first: RunRecord, second: RunRecord) -> None:
    assert first.final.keys() == second.final.keys() and first.final
    for name, weight in first.final.items():
        assert torch.equal(weight, second.final[name]), name


def _together(address: str, folder: str) -> RunRecord:
    os.chdir(folder)
    number = join_group(1, [])
    return run_group(address, number, (Script({0: 2}),))


def test_two_groups_train_what_one_does(gloo: GlooPool, alone: RunRecord, tmp_path: Path) -> None:
    with lighthouse() as address:
        first, second = gloo.run(2, _together, address, str(tmp_path))
    require_same_run(first, alone)
    require_same_run(second, alone)
    require_equal_weights(first, second)


def _counting(address: str, folder: str) -> RunRecord:
    os.chdir(folder)
    return run_group(address, join_group(1, []), (Script({0: 2}),), COUNTED, **{"training.steps": 3})


def test_two_groups_count_what_one_does(gloo: GlooPool, tmp_path: Path) -> None:
    """The statistics of a step are integers, and equal in all groups."""
    job = make_job("tiny", {**SHARED, "training.steps": 3, "job.dump_folder": str(tmp_path / "alone")})
    alone = run_job(replace(job, model=COUNTED))
    with lighthouse() as address:
        first, second = gloo.run(2, _counting, address, str(tmp_path))
    assert first.statistics == second.statistics == alone.statistics
    assert sum(alone.statistics[0]["outside"][0]) == 4 * 32


def _counting_alone(address: str, folder: str) -> RunRecord:
    os.chdir(folder)
    return run_group(address, join_group(1, []), (), COUNTED, **{"training.steps": 2})


def test_the_microbatch_that_warms_up_does_not_count(gloo: GlooPool, tmp_path: Path) -> None:
    """Of two groups, which abandon their first step to copy the state, no warm-up could show."""
    job = make_job("tiny", {**SHARED, "training.steps": 2, "job.dump_folder": str(tmp_path / "alone")})
    alone = run_job(replace(job, model=COUNTED))
    with lighthouse() as address:
        (record,) = gloo.run(1, _counting_alone, address, str(tmp_path))
    assert record.statistics == alone.statistics
    assert record.events.count("step_start 1") == 1


def _leave() -> None:
    raise Leave


def _one_leaves_within_a_step(address: str, folder: str) -> RunRecord | None:
    os.chdir(folder)
    if join_group(1, []) == 0:
        return run_group(address, 0, (Script({0: 2, 3: 1}),), COUNTED, **{"training.steps": 4})
    _fail_once_in_step(3)
    with pytest.raises(Leave):
        run_group(address, 1, (Script({0: 2}),), COUNTED, **{"training.steps": 4})
    return None


@pytest.mark.full
def test_a_step_that_is_abandoned_does_not_count(gloo: GlooPool, tmp_path: Path) -> None:
    job = make_job("tiny", {**SHARED, "training.steps": 4, "job.dump_folder": str(tmp_path / "alone")})
    alone = run_job(replace(job, model=COUNTED))
    with lighthouse() as address:
        stayed, _ = gloo.run(2, _one_leaves_within_a_step, address, str(tmp_path))
    assert stayed.statistics == alone.statistics
    assert "step_start 3" in stayed.events and stayed.events.count("step_start 3") > 1  # it was repeated


def _fail_once_in_step(number: int) -> None:
    """Let the process fail after its group has joined the quorum of step ``number``, while the other waits for its sums."""
    original = step_module.sum_step

    def sum_step(groups: Any, *arguments: Any) -> Any:
        if groups.step == number - 1:
            step_module.sum_step = original
            raise Leave
        return original(groups, *arguments)

    step_module.sum_step = sum_step


def _one_leaves_and_returns(address: str, folder: str, within_step: bool) -> RunRecord:
    os.chdir(folder)
    number = join_group(1, [])
    alone = Path("alone")
    if number == 0:
        # Both start together; steps 3 to 5 need one group, and step 6 needs both again.
        return run_group(address, 0, (Script({0: 2, 3: 1, 6: 2}, {5: alone.touch}),))
    leaving = Script({0: 2}, {} if within_step else {3: _leave})
    if within_step:
        _fail_once_in_step(3)
    with pytest.raises(Leave):
        run_group(address, 1, (leaving,))
    wait_for(alone.exists)
    return run_group(address, 1)


@pytest.mark.parametrize("within_step", [False, True], ids=["between steps", "within a step"])
def test_a_group_leaves_and_returns(gloo: GlooPool, alone: RunRecord, tmp_path: Path, within_step: bool) -> None:
    with lighthouse() as address:
        stayed, returned = gloo.run(2, _one_leaves_and_returns, address, str(tmp_path), within_step)
    require_same_run(stayed, alone)
    require_same_run(returned, alone, first=len(alone.losses) - len(returned.losses) + 1)
    assert len(returned.losses) == 3
    require_equal_weights(stayed, returned)


def _another_job(address: str, folder: str) -> RunRecord | str:
    os.chdir(folder)
    number, begun = join_group(1, []), Path("begun")
    if number == 0:
        return run_group(address, 0, (Script({0: 1, 3: 2, 4: 1}, {2: begun.touch}),))
    wait_for(begun.exists)
    with pytest.raises(UserError) as caught:
        run_group(address, 1, **{"optimizer.lr": 0.5})
    run_group(address, 1)  # now the same job
    return str(caught.value)


def test_a_group_with_another_job_is_refused_and_the_others_continue(
    gloo: GlooPool, alone: RunRecord, tmp_path: Path
) -> None:
    with lighthouse() as address:
        stayed, refused = gloo.run(2, _another_job, address, str(tmp_path))
    assert refused.startswith(
        "optimizer.lr: is 0.5 in this replica group, but 0.002 in its peer; start all replica groups with"
    )
    require_same_run(stayed, alone)


def _one_leaves_before_the_first_sum(folder: str) -> str:
    os.chdir(folder)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as in a job
    rank, port, left = int(os.environ["RANK"]), os.environ["MASTER_PORT"], Path("left")
    group = process_group("gloo", timedelta(seconds=PATIENCE), loopback=True)
    group.configure(f"127.0.0.1:{port}/0", f"replica_{rank}", rank, 2)
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
    if rank == 1:
        group.abort(errored=False)
        left.touch()
        return ""
    wait_for(left.exists)
    with pytest.raises(RuntimeError) as caught:
        group.allreduce([torch.ones(2)], AllreduceOptions()).wait()
    return str(caught.value)


def test_a_group_that_leaves_before_the_first_sum_ends_it_at_once(gloo: GlooPool, tmp_path: Path) -> None:
    """Not when a timeout has passed."""
    assert "Connection closed by peer" in gloo.run(2, _one_leaves_before_the_first_sum, str(tmp_path))[0]


class _Receiver(StateTransport):
    """Begins to receive, and reads no further until the other group repeats the step."""

    stalls = 1
    """How often it does."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        if not _Receiver.stalls:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        _Receiver.stalls -= 1
        repeated = Path("repeated")
        repeated.unlink(missing_ok=True)
        parts = urlsplit(metadata)
        assert parts.port is not None
        with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE) as sender:
            sender.sendall(f"GET {parts.path}{step} HTTP/1.0\r\n\r\n".encode())
            assert sender.recv(1)
            wait_for(repeated.exists)
        raise TimeoutError("the state did not arrive")


@dataclass(eq=False)
class _Joined(Script):
    """A script that creates a file when a step of both groups is repeated."""

    leaves: bool = False
    """Whether the other group will not return."""

    @hookimpl
    def titan_step_cancelled(self, step: int) -> None:
        if self.groups.participants == 2:
            Path("repeated").touch()
            if self.leaves:
                self.least = {step: 1}


def _one_copies_slowly(address: str, folder: str, stalls: int) -> RunRecord | str:
    """The second group joins after step 2."""
    os.chdir(folder)
    number, begun = join_group(1, []), Path("begun")
    short = {"fault_tolerance.process_group_timeout_ms": 1000}
    joins = stalls < MOST_COPIES
    with pytest.MonkeyPatch.context() as patch:
        if number == 0:
            patch.setattr(groups_module, "MOST_FAILURES", 2)  # those of the other group are not counted
            return run_group(address, 0, (_Joined({0: 1, 3: 2}, {2: begun.touch}, leaves=not joins),), **short)
        wait_for(begun.exists)
        patch.setattr(groups_module, "StateTransport", _Receiver)
        patch.setattr(_Receiver, "stalls", stalls)
        if joins:
            return run_group(address, 1, **short)
        with pytest.raises(RunStopped) as caught:
            run_group(address, 1, **short)
        return str(caught.value)


@pytest.mark.full
def test_a_group_that_copies_slowly_ends_nobody(gloo: GlooPool, alone: RunRecord, tmp_path: Path) -> None:
    with lighthouse() as address:
        stayed, joined = gloo.run(2, _one_copies_slowly, address, str(tmp_path), 2)
    require_same_run(stayed, alone)
    require_same_run(joined, alone, first=len(alone.losses) - len(joined.losses) + 1)
    require_equal_weights(stayed, joined)


@pytest.mark.full
def test_a_group_that_never_copies_the_state_ends_alone(gloo: GlooPool, alone: RunRecord, tmp_path: Path) -> None:
    with lighthouse() as address:
        stayed, ended = gloo.run(2, _one_copies_slowly, address, str(tmp_path), MOST_COPIES)
    require_same_run(stayed, alone)
    assert "could not copy the state of a peer 3 times in a row; the last time: the state did not arrive" in ended


def _of_two_ranks(address: str, ports: list[int], folder: str) -> RunRecord:
    os.chdir(folder)
    number = join_group(2, ports)
    if number == 0:
        return run_group(
            address, 0, (Script({0: 2, 3: 1, 5: 2}, {4: Path("alone").touch} if os.environ["RANK"] == "0" else {}),)
        )
    with pytest.raises(Leave):
        run_group(address, 1, (Script({0: 2}, {3: _leave}),))
    wait_for(Path("alone").exists)
    os.environ["MASTER_PORT"] = str(ports[2])  # a store that the group has not used before, as after a restart
    return run_group(address, 1)


@pytest.mark.full
def test_groups_of_two_ranks_that_shard_the_weights(gloo: GlooPool, alone: RunRecord, tmp_path: Path) -> None:
    """FSDP within each group. The second group leaves and returns."""
    with lighthouse() as address, stores(3) as ports:
        first, _, second, _ = gloo.run(4, _of_two_ranks, address, ports, str(tmp_path))
    require_same_run(first, alone)
    require_same_run(second, alone, first=len(alone.losses) - len(second.losses) + 1)
    require_equal_weights(first, second)
