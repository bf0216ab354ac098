"""Describes the environment of a process without secrets: versions, devices and relevant environment variables."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

import torch

from titan_core.toolkit.secrets import REDACTED, is_secret, redact_arguments, redact_text

_RELEVANT = re.compile(
    r"^(TORCH|NCCL|CUDA|OMP_|MKL_|KMP_|TITAN|GLOO|SLURM_|PYTORCH|PYTHON|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_)"
)


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
    return {
        name: REDACTED if is_secret(name) else redact_text(value)
        for name, value in sorted(environment.items())
        if _RELEVANT.match(name)
    }


def command_line(arguments: Sequence[str] | None = None) -> str:
    """Return a command line, quoted for a shell. Default: the command that started this process."""
    return shlex.join(redact_arguments(list(sys.argv if arguments is None else arguments)))
