"""Writes statistics of modules' outputs and of gradients, a file of JSON lines a rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_core.api.build_context import JobContext
from titan_core.api.events import Finding, PendingUpdate, RunStart
from titan_core.api.hookspecs import hookimpl
from titan_core.api.runs.json_lines import LineFile
from titan_core.api.shared_request import SharedRequest
from titan_debug.config import NumericsSection
from titan_debug.numerics.replay import named_gradients, place_in_model, replay
from titan_debug.request import Requests
from titan_debug.statistics.read import RANK_FILE

LOOK_SECONDS = 1.0
"""How often rank 0 looks for a person's request, at most."""


class StatisticsRecorder:
    """Every so many steps, and when a person asks for it. Each rank writes what it holds, without a word to the others;
    readers put it together (:mod:`.read`)."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        section = context.section
        self._freq, self._folder = section.statistics_freq, section.save_statistics_folder
        self._run: RunStart | None = None
        self._file: LineFile | None = None
        self._requests: Requests | None = None  # of people; rank 0 looks, and informs the others
        self._asked: SharedRequest | None = None
        self._looked = 0.0

    @hookimpl(wrapper=True)
    def titan_train_start(self, run: RunStart) -> Generator[None, object, object]:
        """Remember the model's parts, and listen to requests: before anybody can read of the run, and ask."""
        self._run, self._asked = run, run.shared_request()
        if run.world.rank == 0:
            self._requests = Requests(Path(run.dump_folder) / self._folder)
        return (yield)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """See whether somebody requests statistics; this step has them."""
        now = time.monotonic()
        if self._requests is None or self._asked is None or now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        if self._requests.new() is not None:
            self._asked.ask()

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Write a line, where one is due. The gradients are those of the step itself, before they are clipped."""
        run = self._run
        assert run is not None and self._asked is not None
        asked = self._asked.take()
        if not asked and (not self._freq or update.step % self._freq):
            return
        sums: defaultdict[str, list[Tensor]] = defaultdict(list)

        def look(name: str, module: nn.Module, outputs: list[Tensor]) -> None:
            sums[name] += [_moments(output) for output in outputs if output.numel()]

        replay(update, run.parts, look)
        outputs = {name: _together(tensors) for name, tensors in sums.items() if tensors}
        gradients = {name: _together([_moments(tensor)]) for name, tensor in named_gradients(run.parts) if tensor.numel()}
        places = {name: place_in_model(name, run.parts[0].layout) for name in (*outputs, *gradients)}
        record = {
            "step": update.step,
            "attempt": run.attempt,
            "places": places,
            "outputs": outputs,
            "gradients": gradients,
        }
        if self._file is None:
            self._file = LineFile(Path(run.dump_folder) / self._folder / RANK_FILE.format(run.world.rank))
        if self._file.append(record) and asked and run.world.rank == 0:
            run.report(Finding("statistics", f"of modules and gradients, as requested, in {self._folder}", update.step))

    @hookimpl
    def titan_train_end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@torch.no_grad()
def _moments(tensor: Tensor) -> Tensor:
    """Count, sum, sum of squares, largest absolute value and elements that are not finite; fp64, on the tensor's device."""
    # Sums of squares in fp64: in bf16 they would be as wrong as what they are to find.
    return torch.stack(
        [
            torch.tensor(tensor.numel(), dtype=torch.float64, device=tensor.device),
            tensor.sum(dtype=torch.float64),
            torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2,
            tensor.abs().max().double(),
            (~torch.isfinite(tensor)).sum().double(),
        ]
    )


def _together(several: list[Tensor]) -> list[float | int | None]:
    """Over microbatches, for JSON, which has no NaN."""
    all_of = torch.stack(several).cpu()
    count, total, squares, _, bad = all_of.sum(0).tolist()
    figures = (total, squares, all_of[:, 3].max().item())
    return [int(count), *(one if abs(one) < float("inf") else None for one in figures), int(bad)]
