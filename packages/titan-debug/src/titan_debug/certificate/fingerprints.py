"""Computes the fingerprints of a job's weights, each rank from its shards."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_core.api import JobContext, Run, hookimpl
from titan_core.api.parallel.tree import gather_on_first
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.optimizers import global_offset
from titan_debug.certificate.contents import PROJECTIONS, WEIGHTS, Fingerprint, Fingerprints
from titan_debug.config import NumericsSection

log = logging.getLogger(__name__)

_AT_ONCE = 2**18
"""Elements at once: each takes some 300 bytes."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightRecorder:
    """Writes the fingerprints of the weights before the first step of a run and after its last one."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        self._run: Run | None = None
        self._found: dict[str, Fingerprints] = {}

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Read the initial weights."""
        self._run = run
        self._record("before", run.step)

    @hookimpl
    def titan_flush(self, step: int) -> None:
        """Read the weights of a checkpoint, or those of the end."""
        self._record("after", step)

    def _record(self, when: str, step: int) -> None:
        run = self._run
        assert run is not None
        self._found[when] = fingerprints(pair for part in run.parts for pair in part.named_parameters())
        if run.world.rank:
            return
        weights = {when: {name: one.model_dump() for name, one in found.items()} for when, found in self._found.items()}
        steps = {"first": run.step, "step": step, "device": run.world.device.type}
        try:
            with atomic_write(Path(run.dump_folder, WEIGHTS)) as file:
                file.write_text(json.dumps({**steps, **weights}) + "\n", encoding="utf-8")
        except OSError as error:
            log.error("%s cannot be written: %s", Path(run.dump_folder, WEIGHTS), error.strerror)


def fingerprints(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each parameter of all ranks, by name, on the first rank, and nothing on the others. All
    ranks must call it."""
    boxes = {}
    for name, parameter in named:
        local, offset = _box(parameter)
        if local.numel():
            boxes[name, offset, tuple(local.shape)] = fingerprint(local, parameter.shape, offset)
    distinct = {key: one for of_rank, _ in gather_on_first(boxes) for key, one in of_rank.items()}  # of replicas, one
    found: dict[str, Fingerprint] = {}
    for (name, *_), one in sorted(distinct.items(), key=itemgetter(0)):
        found[name] = found[name] + one if name in found else one
    return found


def _box(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
    if isinstance(parameter, DTensor):
        return parameter.to_local(), global_offset(parameter)
    return parameter, (0,) * parameter.dim()


@torch.no_grad()
def fingerprint(local: Tensor, shape: torch.Size, offset: tuple[int, ...]) -> Fingerprint:
    """Return the contribution of a shard to the fingerprint of its parameter.

    Args:
        local: the box of a parameter of ``shape`` that begins at ``offset``.
    """
    flat = local.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    places = torch.arange(PROJECTIONS, device=flat.device)
    checksum = torch.zeros((), dtype=torch.int64, device=flat.device)
    total = torch.zeros(PROJECTIONS + 1, dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.numel(), _AT_ONCE):
        values = flat[begin : begin + _AT_ONCE].double()
        within = torch.arange(begin, begin + len(values), device=flat.device)
        index, stride = torch.zeros_like(within), 1
        for size, first, whole in zip(reversed(local.shape), reversed(offset), reversed(shape), strict=True):
            index += (within % size + first) * stride
            within, stride = within // size, stride * whole
        word = _mixed(index)
        checksum += _mixed(word + bits[begin : begin + _AT_ONCE].long()).sum()
        signs = ((word[:, None] >> places) & 1).double() * 2 - 1
        total += torch.cat([values @ signs, values.square().sum()[None]])
    *projections, squares = total.tolist()
    return Fingerprint(
        shape=tuple(shape),
        dtype=str(local.dtype).removeprefix("torch."),
        checksum=f"{int(checksum) % 2**64:016x}",
        squares=squares,
        projections=tuple(projections),
    )


def _mixed(value: Tensor) -> Tensor:
    """Return random-looking words, ``int64``, for whole numbers: SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014), whose constants these are modulo 2**64."""
    value = (value + 1) * -0x61C8864680B583EB
    for right, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        value = (value ^ _shifted(value, right)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, right: int) -> Tensor:
    return (value >> right) & (2 ** (64 - right) - 1)  # without the sign, which >> would repeat
