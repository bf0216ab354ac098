"""Checks that this machine supports a format, for ``titan doctor --full`` and when a job starts: not when its config is
checked, which may be on a laptop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_core.api import CheckResult, Health, HealthContext, JobContext, Problem
from titan_core.api.config.sections import JobSection
from titan_core.toolkit.device import choose_device, device_name
from titan_float8.config import Float8Section, MXSection

FLOAT8 = (8, 9)
MXFP8 = (10, 0)
FLOAT8_GROUPED = 9
"""Major compute capability of the only GPUs that ``torch.nn.functional.scaled_grouped_mm`` supports with one scale per row
(torch 2.11 to 2.15)."""
MXFP8_GROUPED = 10
"""The same, with blocks of 32."""


def float8(context: JobContext[Float8Section]) -> Iterator[Problem]:
    """Require Ada or newer; for experts, Hopper."""
    yield from _missing(context, "float8", FLOAT8, FLOAT8_GROUPED)


def mxfp8(context: JobContext[MXSection]) -> Iterator[Problem]:
    """Require Blackwell; for experts, Blackwell of data centers."""
    yield from _missing(context, "mx", MXFP8, MXFP8_GROUPED)


def _missing(context: JobContext[Any], name: str, needed: tuple[int, int], grouped: int) -> Iterator[Problem]:
    section = context.section
    if section.emulate:
        return
    device = choose_device(context.job.section(JobSection).device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < needed:
        key, gpu = f"{name}.enable", f"{needed[0]}.{needed[1]} or newer"
    elif section.convert_experts and capability[0] != grouped:
        key, gpu = f"{name}.convert_experts", f"{grouped}.x, for which torch has such products"
    else:
        return
    found = device_name(device)
    if capability is not None:
        found = f"{found} (compute capability {capability[0]}.{capability[1]})"
    yield context.config.problem(
        key,
        f"needs a GPU of compute capability {gpu}, and this job runs on {found}",
        f"set {name}.emulate = true to compute the same numbers in software (slowly), or {key} = false",
    )


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Compare each GPU's compute capability with what float8 and MXFP8 need."""
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        formats = [name for name, needed in (("float8", FLOAT8), ("MXFP8", MXFP8)) if capability >= needed]
        if formats:
            yield CheckResult(f"GPU {index}", Health.OK, f"computes {' and '.join(formats)}")
        else:
            needed = ".".join(map(str, FLOAT8))
            why = f"computes neither float8 nor MXFP8, which need compute capability {needed}"
            yield CheckResult(
                f"GPU {index}", Health.NOTE, why, "set float8.emulate = true to compute the same numbers slowly"
            )
