"""A step that replica groups share.

Each group is a complete job of the *whole* global batch: it reads every sequence, and knows the weight of all targets. Of
the microbatches of a step, each group of the quorum computes a share, and the gradients, which are already divided by the
weight of the global batch, are summed. Whatever the number of groups, a step therefore trains on the same sequences, each
once, and its loss and gradients are those of one group alone. If a group fails within a step, all others abandon the step
and compute it again with the shares of the remaining groups: no sequence is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titan_core.api import (
    Finding,
    ModelPart,
    Problem,
    Run,
    RunEnd,
    Slot,
    StepAbandoned,
    StepInput,
    StepRunner,
    TrainingContext,
    UserError,
    hookimpl,
    matches,
)
from titan_core.api.config.sections import CommSection
from titan_core.api.parallel.microbatch import AuxiliaryLosses, MetricSums
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.random_state import same_generators
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.text import show
from titan_ft.config import FaultToleranceSection
from titan_ft.gradients import sum_step
from titan_ft.groups import ReplicaGroups
from titan_ft.run_state import apply as apply_state, collect, persistent_buffers, require_sendable

log = logging.getLogger(__name__)

_STEP: Slot[SharedStep] = Slot(name="titan_ft.step", summary="the step runner, for its observer")


def apply(part: ModelPart, context: TrainingContext[FaultToleranceSection]) -> ModelPart:
    """Return ``part`` unchanged: replica groups hold the same weights."""
    return part


def observe(parts: Sequence[ModelPart], context: TrainingContext[FaultToleranceSection]) -> SharedStep:
    """Return the job's :class:`SharedStep`, which starts and ends with training."""
    return parts[0].entries(_STEP)[""]


def share(microbatches: int, rank: int, participants: int) -> range:
    """Return the numbers of the microbatches that participant ``rank`` computes."""
    return range(microbatches * rank // participants, microbatches * (rank + 1) // participants)


class SharedStep:
    """A step runner that computes this group's share, with the runner that it wraps."""

    def __init__(
        self, runner: StepRunner, parts: Sequence[ModelPart], context: TrainingContext[FaultToleranceSection]
    ) -> None:
        self._runner, self._parts, self._section = runner, parts, context.section
        self._quorum_seconds = context.job.section(CommSection).train_timeout_seconds
        self._groups: ReplicaGroups | None = None
        self._run: Run | None = None
        self._digest = 0
        self._joined = self._warm = self._checked = False
        self._participants = 0
        self._repeated = 0
        parts[0].fill(_STEP.name, "", self)

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Meet the other groups. A simulated rank is alone."""
        if current_simulation() is not None:
            return
        self._run, self._identity = run, identity_of(run.job)
        self._digest = digest_of(self._identity)
        self._groups = ReplicaGroups(
            self._section, run.world, run.step, self._quorum_seconds, lambda: {"identity": self._identity, **collect(run)}
        )

    @hookimpl
    def titan_figures(self) -> Mapping[str, float]:
        """Return the number of replica groups that took the step, and how often steps were repeated so far."""
        return {"replica_groups": max(1, self._participants), "repeated_steps": self._repeated}

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Leave the other groups."""
        if self._groups is not None:
            self._groups.close(wait=not end.failed)
            self._groups = None

    def evaluate(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`. Each group evaluates everything."""
        return self._runner.evaluate(inputs)

    def __call__(self, inputs: StepInput) -> Tensor:
        """See :class:`~titan_core.api.StepRunner`."""
        groups = self._groups
        # An observer that repeats a step that counts (PendingUpdate.repeat_backward) needs no other group.
        if groups is None or inputs.step <= groups.step:
            return self._runner(inputs)
        with self._constant_buffers():
            if not self._warm:
                self._warm_up(inputs)
            try:
                if not self._joined:
                    self._join(groups)
                self._joined = False
                loss = self._shared(inputs, groups)
            except StepAbandoned:
                self._repeated += 1
                raise
        return loss

    def _join(self, groups: ReplicaGroups) -> None:
        """Form a quorum. If this group is behind, copy the state of a peer.

        Raises:
            StepAbandoned: the quorum failed, or the state was replaced.
            UserError: the peer runs another job.
        """
        run = self._run
        assert run is not None
        replaced, received = groups.join()
        if not replaced:
            return
        mistake, before = None, run.state.step
        if received is not None:
            try:
                require_same(self._identity, received["identity"])
                apply_state(received, run)
            except UserError as error:
                mistake = error
        run.world.raise_together(mistake)
        self._joined = True
        if run.state.step != before:
            self._report(f"copied the state after step {run.state.step} from a peer (was after step {before})")
        raise StepAbandoned

    def _shared(self, inputs: StepInput, groups: ReplicaGroups) -> Tensor:
        """Compute this group's share and sum over all groups.

        Raises:
            StepAbandoned: another group failed.
            UserError: this group runs another job than the first one, or its state could not be sent to a peer.
        """
        run = self._run
        assert run is not None and inputs.auxiliary is not None
        if groups.participants != self._participants:
            self._participants = groups.participants
            self._report(f"{groups.participants} of {self._section.group_size} replica groups take part")
        mine = share(len(inputs.batches), groups.rank, groups.participants)
        with same_generators():
            # What modules draw from a generator of the rank must differ between groups, and be the same when repeated.
            _seed(f"{inputs.seed}:{inputs.step}:{mine.start}:{run.world.data_rank}")
            loss = torch.zeros((), device=run.world.device)
            if mine:
                loss = self._runner(replace(inputs, batches=inputs.batches[mine.start : mine.stop]))
        metrics = inputs.metrics or MetricSums()
        loss = sum_step(groups, self._parts, loss, inputs.auxiliary, metrics, self._digest, inputs.statistics)
        groups.commit()
        if not self._checked:
            require_sendable(collect(run))
            self._checked = True
        return loss

    def _warm_up(self, inputs: StepInput) -> None:
        """Compute one microbatch for nothing, before other groups wait for this one: the first may compile."""
        auxiliary = None if inputs.auxiliary is None else AuxiliaryLosses(inputs.auxiliary.scale)
        with same_generators():
            self._runner(replace(inputs, batches=inputs.batches[:1], auxiliary=auxiliary, metrics=None, statistics=None))
        for part in self._parts:
            part.module.zero_grad()
        self._warm = True

    @contextmanager
    def _constant_buffers(self) -> Iterator[None]:
        """Check, in the first step, that the model changes no buffer of its state: each group would have its own.

        Raises:
            UserError: it does.
        """
        if self._checked:
            yield
            return
        before = {name: buffer.clone() for part in self._parts for name, buffer in persistent_buffers(part).items()}
        yield
        for part in self._parts:
            for name, buffer in persistent_buffers(part).items():
                if not torch.equal(buffer, before[name]):
                    why = "changes in training, and each replica group would have a value of its own"
                    raise UserError.one(f"buffer {name!r} of the model", why, "set fault_tolerance.enable = false")

    def _report(self, message: str) -> None:
        assert self._run is not None
        if self._run.world.rank == 0:
            log.warning("replica group %d: %s", self._section.replica_id, message)
            self._run.report(Finding("replica groups", message, self._run.state.step))


def _seed(text: str) -> None:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % 2**63
    torch.manual_seed(seed)
    random.seed(seed)


_TRAINED = ("model", "training", "data", "parallelism", "objective", "optimizer", "lr_scheduler")
"""Sections whose keys must be the same although a resumed run may change some of them."""
_OF_THE_MACHINE = ("training.stop_at_step", "training.dataset_path", "model.tokenizer_path", "model.from_pretrained")


def identity_of(job: AssembledJob) -> dict[str, Any]:
    """Return the config keys that affect what is trained, the mesh, and the versions of plugins and torch, as JSON values
    without secrets."""
    resolved = job.identity()
    values = resolved["config"]
    found: dict[str, Any] = {}
    for cls in job.config.sections:
        for name in cls.model_fields:
            key = f"{cls.section}.{name}"
            if key not in _OF_THE_MACHINE and (cls.section in _TRAINED or not matches(name, cls.may_change)):
                found[key] = values.get(cls.section, {}).get(name)
    found |= {f"mesh {name}": degree for name, degree in job.mesh.degrees.items()}
    found |= {f"version of {name}": number for name, number in resolved["plugins"].items()}
    found["version of torch"] = torch.__version__
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def digest_of(identity: Mapping[str, Any]) -> int:
    """Return 32 bits of a hash, of which float64 adds up two million exactly."""
    text = json.dumps(identity, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def require_same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compare this group's identity with that of the group whose state it received.

    Raises:
        UserError: lists the differences.
    """
    keys = dict.fromkeys((*mine, *theirs))
    different = [key for key in keys if mine.get(key) != theirs.get(key)]
    if different:
        fix = "start all replica groups with the same recipe, overrides and packages"
        raise UserError(
            *(
                Problem(key, f"is {show(mine.get(key))} in this replica group, but {show(theirs.get(key))} in its peer", fix)
                for key in different
            )
        )
