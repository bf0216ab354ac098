"""Records why a rank failed: its exception, its place in the mesh and its environment, without secrets."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

import torch

from titan_core.api import JobContext, Run, RunEnd, RunStopped, UserError, hookimpl
from titan_core.api.config.secrets import redact, redact_arguments, redact_text
from titan_core.toolkit.errors import PluginFailure, caused_by_peer
from titan_debug.crash.report import RankCrash, crash_folder, write_crash

log = logging.getLogger(__name__)

_RELEVANT = re.compile(
    r"^(TORCH|NCCL|CUDA|OMP_|MKL_|KMP_|TITAN|GLOO|SLURM_|PYTORCH|PYTHON|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_)"
)


class CrashRecorder:
    """The crash recorder of one rank. A run that fails before training needs none: its error explains the problem."""

    def __init__(self, context: JobContext[None]) -> None:
        self._run: Run | None = None
        self._folder = Path()
        self._step = 0

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Enable the recorder."""
        self._step = run.step
        self._folder = crash_folder(Path(run.dump_folder).absolute())
        self._run = run

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Record the current step."""
        self._step = step

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """If an error ended the run, write this rank's file. If the rank failed on its own, log how to read it."""
        run, error = self._run, end.error
        if run is None or error is None or isinstance(error, KeyboardInterrupt):
            return
        crash = self._crash(run, error)
        try:
            write_crash(self._folder, crash)
        except OSError as problem:  # a full disk must not hide the error itself behind a traceback
            log.error("cannot record the failure: %s", problem)
            return
        if not crash.follows:
            command = f"`titan analyse {quote(run.dump_folder)}`"
            log.error("rank %d failed in step %d; %s shows why, and in which environment", crash.rank, crash.step, command)

    def _crash(self, run: Run, error: BaseException) -> RankCrash:
        explained = isinstance(error, UserError | RunStopped) and not isinstance(error, PluginFailure)
        return RankCrash(
            rank=run.world.rank,
            world_size=run.world.size,
            attempt=run.attempt,
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            type=type(error).__name__,
            message=redact_text(str(error)),
            traceback=[] if explained else _lines_of(error),
            follows=caused_by_peer(error),
            coordinates={dim: run.world.coordinate(dim) for dim in run.world.mesh.names},
            environment=describe_environment(run.world.device),
            command=command_line(),
        )


def _lines_of(error: BaseException) -> list[str]:
    return [redact_text(line.rstrip("\n")) for line in traceback.format_exception(error)]


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return versions, devices and environment variables of this process. Queries CUDA only if it is already in use."""
    found = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
    }
    if torch.cuda.is_initialized():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = f"{torch.cuda.get_device_name(device)} ({device}, {torch.cuda.device_count()} on this machine)"
    return found | relevant_variables(os.environ)


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch, NCCL, CUDA, OpenMP, Titan and launchers read, sorted by name."""
    return redact({name: value for name, value in sorted(environment.items()) if _RELEVANT.match(name)})


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return a command line, quoted for a shell. Default: the command that started this process."""
    return shlex.join(redact_arguments(list(sys.argv if arguments is None else arguments)))
