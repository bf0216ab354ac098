"""Writes statistics of module outputs and gradients as JSON lines, one file per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_core.api import Finding, JobContext, PendingUpdate, Run, hookimpl
from titan_core.toolkit.json_lines import LineFile
from titan_debug.config import NumericsSection
from titan_debug.numerics.replay import named_gradients, place_in_model, replay
from titan_debug.numerics.statistics import RANK_FILE
from titan_debug.request import StepRequest


class StatisticsRecorder:
    """Records statistics every ``statistics_freq`` steps and on request. Each rank writes its local statistics without
    communication; :mod:`.statistics` combines them."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        section = context.section
        self._freq, self._folder = section.statistics_freq, section.save_statistics_folder
        self._run: Run | None = None
        self._file: LineFile | None = None
        self._request: StepRequest | None = None

    @hookimpl(wrapper=True)
    def titan_train_start(self, run: Run) -> Generator[None, object, object]:
        """Start to accept requests before other observers announce the run, so that no request is missed."""
        self._run, self._request = run, StepRequest(run, Path(run.dump_folder) / self._folder)
        return (yield)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Poll for a request, which the current step then serves."""
        if self._request is not None:
            self._request.poll()

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Write a line if one is due. The gradients are those of the step itself, before clipping."""
        run = self._run
        assert run is not None and self._request is not None
        requested = self._request.take()
        if not requested and (not self._freq or update.step % self._freq):
            return
        sums: defaultdict[str, list[Tensor]] = defaultdict(list)

        def on_output(name: str, module: nn.Module, outputs: list[Tensor]) -> None:
            sums[name] += [_moments(output) for output in outputs if output.numel()]

        replay(update, run.parts, on_output)
        outputs = {name: _combined(tensors) for name, tensors in sums.items() if tensors}
        gradients = {name: _combined([_moments(tensor)]) for name, tensor in named_gradients(run.parts) if tensor.numel()}
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
        if self._file.append(record) and requested and run.world.rank == 0:
            message = f"wrote the requested statistics of modules and gradients to {self._folder}"
            run.report(Finding("statistics", message, update.step))

    @hookimpl
    def titan_train_end(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@torch.no_grad()
def _moments(tensor: Tensor) -> Tensor:
    """Return count, sum, sum of squares, largest absolute value and number of non-finite elements: fp64, shape ``[5]``, on
    the tensor's device."""
    # Sums of squares in fp64: bf16 would be too inaccurate to reveal errors of bf16 computations.
    return torch.stack(
        [
            torch.tensor(tensor.numel(), dtype=torch.float64, device=tensor.device),
            tensor.sum(dtype=torch.float64),
            torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2,
            tensor.abs().max().double(),
            (~torch.isfinite(tensor)).sum().double(),
        ]
    )


def _combined(moments: list[Tensor]) -> list[float | int | None]:
    """Combine the moments of microbatches. Non-finite values become ``None``, because JSON cannot represent them."""
    stacked = torch.stack(moments).cpu()
    count, total, squares, _, bad = stacked.sum(0).tolist()
    figures = (total, squares, stacked[:, 3].max().item())
    return [int(count), *(value if abs(value) < float("inf") else None for value in figures), int(bad)]
