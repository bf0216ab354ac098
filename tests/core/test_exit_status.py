"""The exit status of each way in which a process ends (docs/failures.md)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from titan_core.api import Problem, RunStopped, UserError
from titan_core.cli.main import main
from titan_core.toolkit.errors import PluginFailure, exit_status
from titan_testing.jobs import TINY


class AcceleratorError(RuntimeError):
    """Has the name of torch's type, which torch 2.11 may lack and Python code cannot raise with a message of CUDA's."""


def plugin_failure(cause: BaseException) -> PluginFailure:
    error = PluginFailure(Problem("plugin 'mine'", f"titan_step_start raised {cause!r}"))
    error.__cause__ = cause
    return error


def raised_by(act: Callable[[], object]) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
        act()
    return caught.value


ENDS = [
    (UserError.one("the data", "is damaged"), 2),
    (plugin_failure(ValueError("no")), 1),
    (PluginFailure(Problem("plugin 'mine'", "titan_step_start returned 3")), 2),
    (RunStopped("enough"), 1),
    (ValueError("no"), 1),
    (KeyboardInterrupt(), 130),
    # Lost peers, also seen through a plugin's hook
    (RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:43699"), 69),
    (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete"), 69),
    (DistNetworkError("Connection reset"), 69),
    (DistBackendError("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"), 69),
    (plugin_failure(RuntimeError("Connection closed by peer")), 69),
    # Memory
    (raised_by(lambda: bytearray(1 << 60)), 71),
    (raised_by(lambda: torch.empty(1 << 50)), 71),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), 71),
    (RuntimeError("CUDA error: out of memory"), 71),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), 71),
    (plugin_failure(torch.OutOfMemoryError("CUDA out of memory.")), 71),
    # Hardware
    (AcceleratorError("CUDA error: uncorrectable ECC error encountered"), 74),
    (RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"), 74),
    (AcceleratorError("CUDA error: hardware stack error"), 74),
    (DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, ncclSystemError"), 74),
    (RuntimeError("Unable to determine the device handle for GPU0: GPU is lost"), 74),
    (RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"), 74),
    # Mistakes in code, and the same words from elsewhere
    (AcceleratorError("CUDA error: device-side assert triggered"), 1),
    (AcceleratorError("CUDA error: an illegal memory access was encountered"), 1),
    (ValueError("the column 'Xid' is missing"), 1),
    (OSError(errno.EIO, "Input/output error"), 1),
]


@pytest.mark.parametrize(
    ("error", "status"), ENDS, ids=[f"{type(error).__name__}-{at}" for at, (error, _) in enumerate(ENDS)]
)
def test_an_error_has_the_status_of_its_cause(error: BaseException, status: int) -> None:
    assert exit_status(error) == status


def test_an_error_while_another_is_handled_does_not_hide_the_lack_of_memory() -> None:
    def clean_up() -> None:
        try:
            bytearray(1 << 60)
        except MemoryError:
            raise ValueError("cannot clean up")  # noqa: B904 - as it happens by mistake

    assert exit_status(raised_by(clean_up)) == 71


def train(overrides: dict[str, object]) -> int:
    settings = {**TINY, "job.dump_folder": "run", "metrics.log_freq": 1, **overrides}
    return main(["train", "tiny", *(f"--{key}={value}" for key, value in settings.items())])


def test_data_that_ends_before_the_last_step(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ",".join(["300"] * 8)
    data = {"training.dataset": "letters", "training.dataset_path": few, "data.on_end": "stop", "training.steps": 500}
    assert train(data) == 66
    assert "the dataset has ended" in capsys.readouterr().out
