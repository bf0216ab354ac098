"""Checks that this machine supports a format. They run when a job starts, not when its config is checked, which may be on a
laptop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from titan_core.api import JobContext, Problem
from titan_core.toolkit.device import choose_device, device_name
from titan_core.toolkit.sections import JobSection
from titan_float8.config import Float8Section, MXSection

FLOAT8 = (8, 9)
GROUPED = (9, 0)
MXFP8 = (10, 0)


def float8(context: JobContext[Float8Section]) -> Iterator[Problem]:
    """Require Ada, Hopper or Blackwell; for experts, one of the latter two."""
    if not context.section.emulate:
        yield from _missing(context, "float8", GROUPED if context.section.convert_experts else FLOAT8)


def mxfp8(context: JobContext[MXSection]) -> Iterator[Problem]:
    """Require Blackwell."""
    if not context.section.emulate:
        yield from _missing(context, "mx", MXFP8)


def _missing(context: JobContext[Any], section: str, needed: tuple[int, int]) -> Iterator[Problem]:
    device = choose_device(context.job.section(JobSection).device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability >= needed:
        return
    found = device_name(device)
    if capability is not None:
        found = f"{found} (compute capability {capability[0]}.{capability[1]})"
    yield context.config.problem(
        f"{section}.enable",
        f"needs a GPU of compute capability {needed[0]}.{needed[1]} or newer, and this job runs on {found}",
        f"set {section}.emulate = true to compute the same numbers in software (slowly), or {section}.enable = false",
    )
