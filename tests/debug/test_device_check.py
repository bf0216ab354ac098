"""Which ranks repeat each other's work, and which one is to blame if they disagree."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from titan_core.api import MeshDim, UserError, hookimpl
from titan_core.api.parallel.mesh import STANDARD_DIMS, MeshPlan, MeshView
from titan_core.cli.main import main
from titan_debug.devices.device_check import multiplies_exactly
from titan_debug.devices.groups import Ring, rings
from titan_debug.devices.verdict import FOLDER, Comparison, Difference, Suspects, suspects_in
from titan_debug.request import STEP_POLL_SECONDS
from titan_testing import PATIENCE
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, make_job, run_recipe

EXPERTS = MeshView("ep", "x.ep", ("dp_shard", "cp"))


def mesh_of(ep: int = 1, **degrees: int) -> MeshPlan:
    return MeshPlan(STANDARD_DIMS, {dim.name: degrees.get(dim.name, 1) for dim in STANDARD_DIMS}, (EXPERTS,), {"ep": ep})


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (mesh_of(dp_shard=3), [[[0], [1], [2]]]),
        (mesh_of(dp_replicate=2, dp_shard=2), [[[0], [1], [2], [3]]]),
        (mesh_of(tp=4), [[[0, 1, 2, 3]]]),  # one group
        (mesh_of(dp_shard=2, tp=2), [[[0, 1], [2, 3]]]),
        (mesh_of(dp_shard=2, cp=2), [[[0, 1], [2, 3]]]),
        (mesh_of(pp=2, dp_shard=2), [[[0, 2], [1, 3]]]),
        (mesh_of(pp=2, dp_shard=2, tp=2), [[[0, 1, 4, 5], [2, 3, 6, 7]]]),
        (mesh_of(ep=2, dp_shard=4), [[[0, 1], [2, 3]]]),
        (mesh_of(ep=4, dp_shard=4), [[[0, 1, 2, 3]]]),
        (mesh_of(ep=2, dp_shard=2, cp=2), [[[0, 1], [2, 3]]]),  # the ranks of a sequence share the experts
        (mesh_of(ep=2, pp=2, dp_shard=4), [[[0, 1, 4, 5], [2, 3, 6, 7]]]),
    ],
    ids=str,
)
def test_ranks_that_exchange_something_are_one_group(plan: MeshPlan, expected: list[list[list[int]]]) -> None:
    assert rings(plan) == expected


def test_replicas_whose_weights_diverge_have_rings_of_their_own() -> None:
    dims = (MeshDim("islands", "x.islands", "batch", diverges=True), *STANDARD_DIMS)
    degrees = {dim.name: 2 if dim.name in ("islands", "dp_shard") else 1 for dim in dims}
    assert rings(MeshPlan(dims, degrees)) == [[[0], [1]], [[2], [3]]]


def compared(ring: Ring, results: dict[int, Sequence[object]], shifts: tuple[int, ...], first: str = "w") -> Suspects | None:
    """Return the verdict where the ranks of some groups found other results than 0, repetition by repetition.

    Args:
        results: by rank, what it found each time that it computed something; 0 is right.
    """
    found: dict[int, list[Comparison]] = {}
    for number, group in enumerate(ring):
        for position, rank in enumerate(group):
            executors = [ring[(number - shift) % len(ring)][position] for shift in shifts]
            of_rank = [results.get(one, [0] * len(shifts))[index] for index, one in enumerate(executors)]
            pairs = [(one, other) for other in range(len(shifts)) for one in range(other) if of_rank[one] != of_rank[other]]
            # Within a group, an error of a later rank shows later.
            found[rank] = [
                Comparison(shifts, {pair: Difference((0, 0, position, 0), f"{first}{position}") for pair in pairs})
            ]
    return suspects_in(ring, found)


ALONE, OF_TWO = [[0], [1], [2]], [[0, 1], [2, 3]]
THREE, TWO = (0, 1, 0, 1, 2), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("ring", "shifts", "results", "blamed"),
    [
        (ALONE, THREE, {}, None),
        (ALONE, THREE, {1: [7] * 5}, (1,)),  # outvoted
        (ALONE, THREE, {1: [7, 0, 0, 0, 0]}, (1,)),  # once
        (ALONE, THREE, {1: [7, 8, 9, 7, 8]}, (1,)),  # each time something else
        ([[0], [1]], TWO, {1: [7] * 4}, (0, 1)),  # nobody else to ask
        ([[0], [1]], TWO, {1: [7, 0, 7, 7]}, (1,)),
        (OF_TWO, TWO, {3: [7, 7, 0, 0]}, (3,)),
        (OF_TWO, TWO, {2: [7, 0, 0, 0], 3: [7, 0, 0, 0]}, (2,)),  # which passed the error on
        (OF_TWO, TWO, {2: [7] * 4, 3: [7] * 4}, (0, 2)),
    ],
)
def test_the_rank_whose_results_differ_first_is_blamed(
    ring: Ring, shifts: tuple[int, ...], results: dict[int, Sequence[object]], blamed: tuple[int, ...] | None
) -> None:
    verdict = compared(ring, results, shifts)
    assert (None if verdict is None else verdict.ranks) == blamed
    assert verdict is None or not verdict.everywhere


def test_ranks_that_all_compute_something_else_each_time_are_not_to_blame() -> None:
    verdict = compared(ALONE, {rank: [10 * rank + time for time in range(5)] for rank in range(3)}, THREE)
    assert verdict is not None and verdict.everywhere


def test_an_output_differs_before_a_gradient() -> None:
    outputs, gradients = Difference((0, 1, 5, 0), "output"), Difference((1, -1, -5, 0), "gradient")
    found = {rank: [Comparison((0, 1), {(0, 1): one})] for rank, one in enumerate((gradients, outputs, gradients, outputs))}
    assert suspects_in(OF_TWO, found) == Suspects((1, 3), "output", False)


def test_products_of_whole_numbers_are_exact() -> None:
    assert multiplies_exactly(torch.device("cpu"))


@pytest.mark.parametrize(
    ("ranks", "settings", "why"),
    [
        (1, {"job.device": "cpu"}, "this job has no two groups of ranks that hold the same weights (one device)"),
        (
            2,
            {"job.device": "cuda"},
            "this job does not compute the same bits twice on a GPU; set training.deterministic = true",
        ),
    ],
)
def test_a_job_that_cannot_compare_ranks_is_refused(ranks: int, settings: dict[str, object], why: str) -> None:
    with pytest.raises(UserError) as error:
        make_job("tiny", {**TINY, **settings, "numerics.replay_freq": 2}, ranks, missing_ok=True)
    assert f"numerics.replay_freq = 2: compares ranks, but {why}" in str(error.value)


class Patient:
    """Makes training wait for the request."""

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while step == 3 and not Path("run", FOLDER, "requested").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if step == 3:
            time.sleep(STEP_POLL_SECONDS)


def trained(folder: str, device: str) -> list[float]:
    os.chdir(folder)
    settings = {**TINY, "training.steps": 8, "job.dump_folder": "run", "job.device": device}
    return run_recipe("tiny", settings, observers=[Patient()]).losses


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "status", "answer"),
    [
        ("cpu", 0, ": all ranks compute the same as others, bit by bit"),
        ("auto", 2, "cannot be repeated on other ranks: this job does not compute the same bits twice on a GPU"),
    ],
)
def test_a_running_job_compares_its_ranks_on_request(
    gloo: GlooPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, status: int, answer: str
) -> None:
    events = tmp_path / "run/events.jsonl"
    with ThreadPoolExecutor(1) as executor:
        run = executor.submit(gloo.run, 2, trained, str(tmp_path), device)
        deadline = time.monotonic() + PATIENCE
        while not (run.done() or (events.exists() and events.read_text())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert main(["replay", str(tmp_path / "run")]) == status
        assert all(len(losses) == 8 for losses in run.result())
    captured = capsys.readouterr()
    assert answer in (captured.err if status else captured.out)


def test_a_run_that_has_ended_compares_nothing(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("tiny", {**TINY, "job.dump_folder": "run"})
    assert main(["replay", "run"]) == 2
    assert "is not running" in capsys.readouterr().err
