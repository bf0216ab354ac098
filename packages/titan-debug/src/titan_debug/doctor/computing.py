"""Computations as training does them: a product and its gradient on each device, a compiled function, an all-reduce between
processes."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from titan_core.api import CheckResult, HealthContext, UserError
from titan_core.toolkit.jobs import Health
from titan_core.toolkit.processes import python
from titan_core.toolkit.text import shorten

_ALL_REDUCE = """
import sys, torch, torch.distributed as dist
rank, path, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method="file://" + path, rank=rank, world_size=2)
number = torch.ones((), device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(number)
assert number.item() == 2, number
dist.destroy_process_group()
"""
_PATIENCE_SECONDS = 120


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Compute on each device, compile, and connect two processes."""
    import torch

    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    for device in devices:
        yield _attempt(f"matmul on {device}", partial(_matmul, device), "reinstall torch, or update the driver")
    for device in devices[:2]:
        fix = "see the compilers above, or set compile.enable = false"
        yield _attempt(f"torch.compile for {device.type}", partial(_compile, device), fix)
    fix = "see the network above; NCCL_DEBUG=INFO prints what NCCL tries"
    yield _attempt("all-reduce with gloo", partial(_all_reduce, "gloo"), fix)
    if len(devices) > 2:
        yield _attempt("all-reduce with NCCL", partial(_all_reduce, "nccl"), fix)


def _attempt(subject: str, compute: Callable[[], None], fix: str) -> CheckResult:
    try:
        compute()
    except Exception as error:  # noqa: BLE001 - any failure is the result of this check
        lines = (str(error).strip() or type(error).__name__).splitlines()
        # Compilers and processes write the cause last.
        return CheckResult(subject, Health.ERROR, f"fails: {shorten(lines[-1])}", fix)
    return CheckResult(subject, Health.OK, "works")


def _matmul(device: object) -> None:
    import torch

    weight = torch.full((64, 64), 0.5, device=device, dtype=torch.bfloat16, requires_grad=True)  # type: ignore[call-overload]
    total = (weight @ weight).float().sum()
    total.backward()
    if not math.isclose(total.item(), 64**3 * 0.25):
        raise UserError.one(str(device), f"64 x 64 x 64 quarters sum to {total.item()}", "do not train on this device")


def _compile(device: object) -> None:
    import torch

    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2

    x = torch.ones(8, device=device)  # type: ignore[call-overload]
    torch.testing.assert_close(double(x), torch.sin(x) * 2)


def _all_reduce(backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                python("-c", _ALL_REDUCE, str(rank), f"{folder}/store", backend),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                _, errors = rank.communicate(timeout=_PATIENCE_SECONDS)
                if rank.returncode:
                    raise RuntimeError(errors.strip() or f"a process ended with exit status {rank.returncode}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
