"""Measures one configuration of Titan or of the bare loop, in a process of its own; :mod:`benchmarks.gpu.processes` starts
it."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bare_loop import BareLoop
from benchmarks.gpu.cases import Case, Plan
from benchmarks.gpu.meter import Measurement, Meter
from titan_core.api import StepReport, hookimpl
from titan_core.api.config.resolved import Override
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.loop.training import train
from titan_core.plugins.registry import Components
from titan_core.toolkit.device import choose_device
from titan_debug.peak_flops import peak_flops


class MeterOfARun:
    """Passes the steps of Titan's trainer to a meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.losses: list[torch.Tensor] = []

    @hookimpl(tryfirst=True)
    def titan_step_start(self, step: int) -> None:
        """Begin a step."""
        self._meter.begin(step)

    @hookimpl(trylast=True)
    def titan_step_end(self, report: StepReport) -> None:
        """End a step."""
        self._meter.end(report.step)
        self.losses.append(report.loss)


def job_of(case: Case, plan: Plan, folder: str) -> AssembledJob:
    """Return the job of a Titan case; for other cases, one that describes the same model and batch."""
    settings = {**plan.overrides(case), "job.dump_folder": folder}
    installed = Components.from_installed()
    present = installed.sections()
    given = [Override(key, text) for key, text in settings.items() if key.partition(".")[0] in present]
    config, registry = load_config(plan.recipe, given, installed)
    return assemble(config, registry, 1)


def measure_titan(job: AssembledJob, meter: Meter) -> list[float]:
    """Train ``job`` by Titan's trainer, as `titan train` does; return the first and the last loss."""
    observer = MeterOfARun(meter)
    train(job, [observer])
    return [observer.losses[0].item(), observer.losses[-1].item()]


def measure_bare(job: AssembledJob, meter: Meter, case: Case, plan: Plan, device: torch.device) -> list[float]:
    """Train the model of ``job`` by the bare loop on random tokens; return the first and the last loss."""
    definition, batch = job.model, job.batch
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = definition.build()
    model.to_empty(device=device)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)
    for name, compute in definition.layout.buffers.items():
        model.get_buffer(name).copy_(compute())
    loop = BareLoop(
        model,
        dtype=getattr(torch, str(job.config.value("training.mixed_precision_param"))),
        compilation=case.settings["compilation"],  # type: ignore[arg-type]
        blocks=model.get_submodule(definition.layout.blocks).children(),
        backend=plan.backend,
    )
    tokens = torch.randint(256, (batch.local_size, batch.seq_len + 1), device=device)
    losses = []
    for step in range(1, plan.all_steps + 1):
        meter.begin(step)
        loss, _ = loop.step(tokens[:, :-1], tokens[:, 1:])
        meter.end(step)
        losses.append(loss)
    return [losses[0].item(), losses[-1].item()]


def measure(case: Case, plan: Plan, started: float) -> Measurement:
    """Run ``case`` and return its measurement."""
    with tempfile.TemporaryDirectory(prefix="titan-gpu-") as folder:
        job = job_of(case, plan, folder)
        device = choose_device(plan.device)
        meter = Meter(device, started, plan.warmup, plan.steps, plan.probes)
        losses = measure_titan(job, meter) if case.kind == "titan" else measure_bare(job, meter, case, plan, device)
        batch = job.batch
        flops = job.model.flops_per_token(batch.seq_len)
        return replace(meter.result(batch.tokens_per_step, flops, peak_flops(device, torch.bfloat16)), losses=losses)


def main() -> None:
    """Read the case, measure it, and write the result to the file given as the second argument."""
    given = json.loads(sys.argv[1])
    found = measure(Case(**given["case"]), Plan(**given["plan"]), float(sys.argv[3]))
    Path(sys.argv[2]).write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
