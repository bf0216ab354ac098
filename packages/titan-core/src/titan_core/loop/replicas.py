"""Compares the weights of ranks that must hold the same ones, after some steps and before each checkpoint.

A trial (:mod:`titan_core.model.mesh_trial`) has compared the gradients of one step. This finds what changes later: gradients
that are not summed in a later step, or an update that differs between ranks. Each rank computes a checksum of
each of its shards; one reduction of a few kilobytes over each dimension of the mesh compares them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_core.api import DATA_DIMS, Finding, JobContext, Run, StepReport, UserError, hookimpl
from titan_core.model.materialise import local_box
from titan_core.toolkit.checksum import checksum
from titan_core.toolkit.random_state import same_generators
from titan_core.toolkit.simulation import current_simulation

log = logging.getLogger(__name__)

STEPS = (1, 2, 10, 100)
"""Steps after the start, or the resume, of a run after which weights are compared."""


@dataclass(frozen=True)
class _Replicated:
    """The parameters that each rank of a mesh dimension or view holds the same elements of."""

    over: str
    degree_key: str
    indices: Tensor
    exact: bool
    """Whether their bits must be equal. Ranks with the same tokens may each compute a gradient, in which operators that are
    not deterministic round differently."""


class ReplicaCheck:
    """An observer that ends a run whose replicas of the weights differ."""

    def __init__(self, context: JobContext[None]) -> None:
        self._run: Run | None = None
        self._named: list[tuple[str, nn.Parameter]] = []
        self._replicated: list[_Replicated] = []
        self._reported = False
        self._checked = 0
        """The step after which weights were compared last."""

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Find the parameters that several ranks hold."""
        if current_simulation() is not None:  # tensors have no values
            return
        self._run = run
        self._named = [pair for part in run.parts for pair in part.named_parameters()]
        boxes = [(name, tuple(local.shape), first) for name, (local, first) in self._boxes()]
        keys = torch.tensor([zlib.crc32(repr(box).encode()) for box in boxes], dtype=torch.int64)
        names = torch.tensor([zlib.crc32(repr([name for name, _ in self._named]).encode())])
        deterministic = run.world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        plan, mesh = run.world.plan, run.world.mesh
        found: list[tuple[str, str, bool]] = [
            (dim.name, dim.degree_key, dim.sees_different_data or deterministic)
            for dim in plan.dims
            if not dim.diverges and dim.divides != "layers"
        ]
        found += [(name, view.degree_key, True) for view in plan.views for name in (view.name, view.remainder)]
        for over, key, exact in found:
            # Where ranks have parameters of other names, nothing can be compared.
            if over in mesh and mesh[over].size() > 1 and self._equal(over, names).all():
                indices = self._equal(over, keys).nonzero().flatten()
                if len(indices):
                    self._replicated.append(_Replicated(over, key, indices, exact))

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Compare after the first steps."""
        if self._run is not None and report.step - self._run.step in STEPS:
            self._check(report.step)

    @hookimpl
    def titan_flush(self, step: int) -> None:
        """Compare before a checkpoint is taken."""
        if step != self._checked:
            self._check(step)

    def _check(self, step: int) -> None:
        """
        Raises:
            UserError: replicas differ; on every rank.
        """
        run, self._checked = self._run, step
        if run is None:
            return
        sums = torch.stack([checksum(local).to(run.world.device) for _, (local, _) in self._boxes()])
        mistake: UserError | None = None
        for replicated in self._replicated:
            indices = replicated.indices
            different = indices[~self._equal(replicated.over, sums[indices.to(sums.device)])].tolist()
            if not different:
                continue
            error = self._mistake(step, replicated, [self._named[index][0] for index in different])
            if replicated.exact:
                mistake = mistake or error
            elif not self._reported:
                self._reported = True
                log.error("%s", error)
                with same_generators():
                    run.report(Finding("replicas differ", str(error), step))
        run.world.raise_together(mistake)

    def _equal(self, over: str, values: Tensor) -> Tensor:
        """Return which of ``values``, whole numbers, are the same on all ranks of a mesh dimension or view; on the CPU."""
        assert self._run is not None
        both = torch.cat([values, ~values]).to(self._run.world.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._run.world.mesh[over].get_group())
        most, least = both.cpu().chunk(2)
        return most == ~least

    def _boxes(self) -> Iterator[tuple[str, tuple[Tensor, tuple[int, ...]]]]:
        """Yield each parameter's name, and this rank's shard with the index of its first element."""
        return ((name, local_box(parameter)) for name, parameter in self._named)

    def _mistake(self, step: int, of: _Replicated, names: Sequence[str]) -> UserError:
        assert self._run is not None
        job = self._run.job
        data = (*job.mesh.data_dims("shard"), *job.mesh.data_dims("replicate"))
        owners = [
            str(job.registry.origin(transform))
            for transform in job.transforms
            if {of.over, *([DATA_DIMS] if of.over in data else [])} & {*transform.mesh.sums}
            or of.degree_key in transform.served
        ]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        why = (
            f"parameter {names[0]!r}{more}: the ranks of mesh dimension {of.over!r} ({of.degree_key}) must hold the same "
            f"values, and do not. Gradients are not summed over {of.over!r} in each step, or something changes weights on "
            "some ranks only"
        )
        fix = f"fix {' or '.join(owners)}, or the optimizer or observer that changes weights"
        return UserError.one(f"step {step}", why, f"{fix}; resume from a checkpoint of an earlier step")
