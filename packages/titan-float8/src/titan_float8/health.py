"""``titan doctor --full``: which formats each GPU computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from titan_core.api import CheckResult, Health, HealthContext
from titan_float8.hardware import FLOAT8, MXFP8


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
