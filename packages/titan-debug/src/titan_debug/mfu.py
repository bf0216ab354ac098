"""Model FLOPs utilisation (MFU): the share of the devices' peak that a run achieves."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from titan_core.api import JobContext, ModelPart, Record, Run, World, hookimpl
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_debug.peak_flops import IdealTime, ideal_time_per_token, peak_flops
from titan_debug.slots import FLOPS

log = logging.getLogger(__name__)


class Mfu:
    """Adds ``mfu`` and ``mfu_estimated`` to the metrics of each logged step."""

    def __init__(self, context: JobContext[None]) -> None:
        self._facts = context.job
        self._ideal = IdealTime(0.0, estimated=True)
        self._devices = 1
        self._warned = False

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Determine the time per token at peak speed, on rank 0 only, which has the loggers."""
        trained = self._facts.trained_flops if isinstance(self._facts, AssembledJob) else None
        others = flops_by_type(run.parts, run.world, all_passes if trained is None else trained.passes)
        self._devices = run.world.size
        if run.world.rank == 0:
            flops = self._facts.flops_per_token
            dtype = getattr(torch, self._facts.section(TrainingSection).mixed_precision_param)
            self._ideal = ideal_time_per_token(flops, dtype, others, run.world.device)
            slow = slow_precision(run.world.device, self._facts.section(TrainingSection))
            if slow is not None:
                log.warning("%s", slow)

    @hookimpl
    def titan_figures(self, record: Record) -> Mapping[str, float]:
        """Return the share of the peak, and whether that peak was measured rather than published."""
        speed = record["tokens_per_second"]
        assert speed is not None
        mfu = speed * self._ideal.seconds / self._devices
        if mfu > 1.0 and not self._warned:
            self._warned = True
            log.warning(
                "MFU is %.0f %%, so the %s peak of this device is too low: %s",
                100 * mfu,
                "estimated" if self._ideal.estimated else "published",
                "it was probably measured on a busy machine" if self._ideal.estimated else "check the device's model name",
            )
        return {"mfu": mfu, "mfu_estimated": self._ideal.estimated}


def slow_precision(device: torch.device, training: TrainingSection) -> str | None:
    """Return what the job loses by computing in fp32, if its GPU is much faster in bf16."""
    if device.type != "cuda" or training.mixed_precision_param != "float32":
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):  # before Ampere, bf16 is emulated
        return None
    how = (
        "without tensor cores"
        if training.float32_matmul_precision == "highest"
        else "in TF32, at half the speed of bfloat16"
    )
    peak = peak_flops(device, torch.bfloat16)
    reaches = "" if peak is None else f" (in bfloat16, this GPU reaches {peak / 1e12:,.0f} TFLOP/s)"
    return (
        f"fp32 matmuls run {how}{reaches}, and fp32 activations take twice the memory: set "
        'training.mixed_precision_param = "bfloat16" (the optimizer keeps fp32 weights)'
    )


def all_passes(module: str) -> float:
    """Return the number of products of a trained matrix in a step: forward, for its input's gradient, and for its own."""
    return 3.0


def flops_by_type(
    parts: Sequence[ModelPart], world: World, passes: Callable[[str], float] = all_passes
) -> dict[torch.dtype, float]:  # fmt: skip
    """Return the whole model's matmul FLOPs per token in types other than the job's. All ranks must call this.

    Args:
        passes: name of a module -> the number of its products in a step, of the three that the modules record.
    """
    mine: dict[torch.dtype, float] = defaultdict(float)
    if world.is_first_along("batch", "sequence", "weights"):  # one rank per pipeline stage
        for part in parts:
            for name, (dtype, per_token) in part.entries(FLOPS).items():
                mine[dtype] += per_token * passes(name) / 3.0
    total: dict[torch.dtype, float] = defaultdict(float)
    for flops in world.gather(dict(mine)):
        for dtype, per_token in flops.items():
            total[dtype] += per_token
    return dict(total)
