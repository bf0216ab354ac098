"""Repeats a step on other ranks, and names the device that computes something else.

Every rank repeats the forward and backward pass of the step twice: with its own microbatches, and with those of the same
rank in the next group of ranks (:mod:`.groups`), all with the same weights. Of each gradient, before ranks sum it, it keeps
a checksum of the bits. Ranks then compare what two of them computed of the same work. Only if that differs is the step
repeated more often, with a checksum of each module's output, until :mod:`.verdict` can say which rank is wrong.

The idea is that of TorchTitan's replayer (pull request 4333), which repeats on the same rank, and of Megatron-LM's rerun
state machine, which repeats on another device after a restart.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_core.api import (
    Batch,
    Finding,
    JobContext,
    ModelPart,
    PendingUpdate,
    Run,
    UserError,
    hookimpl,
)
from titan_core.toolkit.checksum import checksum
from titan_core.toolkit.errors import BadDevice
from titan_core.toolkit.simulation import current_simulation
from titan_core.toolkit.text import ranks
from titan_debug.config import NumericsSection
from titan_debug.devices.groups import rings, why_no_replay
from titan_debug.devices.verdict import ALIKE, BAD, FOLDER, REFUSED, Comparison, Difference, Place, suspects_in
from titan_debug.numerics.replay import observed_outputs, place_in_model
from titan_debug.request import StepRequest

log = logging.getLogger(__name__)

_FACTOR = 0x5851F42D4C957F2D
"""Weighs the checksums of a gradient's microbatches, modulo 2**64 (Knuth's MMIX)."""
_SIDE, _PRODUCTS = 256, 8
"""Rows of the matrices that each device multiplies, once one is wrong, and the number of products."""


class DeviceCheck:
    """Checks every ``replay_freq`` steps and on request."""

    def __init__(self, context: JobContext[NumericsSection]) -> None:
        self._context, self._freq = context, context.section.replay_freq
        self._run: Run | None = None
        self._request: StepRequest | None = None
        self._passed, self._refused = "", False

    @hookimpl(wrapper=True)
    def titan_train_start(self, run: Run) -> Generator[None, object, object]:
        """Start to accept requests before other observers announce the run, so that no request is missed."""
        if current_simulation() is None:
            self._run, self._request = run, StepRequest(run, Path(run.dump_folder) / FOLDER)
        return (yield)

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        """Poll for a request, which the current step then serves."""
        if self._request is not None:
            self._request.poll()

    @hookimpl(tryfirst=True)
    def titan_before_update(self, update: PendingUpdate) -> None:
        """Check the devices if that is due.

        Raises:
            BadDevice: a device computes wrong numbers. Raised on every rank.
        """
        if self._run is None or self._request is None:
            return
        requested = self._request.take()
        if not requested and (not self._freq or update.step % self._freq):
            return
        if found := why_no_replay(self._context):
            kind, message = REFUSED, f"step {update.step} cannot be repeated on other ranks: this job {found[0]}"
            if self._run.world.rank == 0 and not requested and not self._refused:
                log.warning("%s; %s (numerics.replay_freq)", message, found[1])
            self._refused = True
        else:
            self._check(self._run, update)
            self._passed = f"of step {update.step}, in which all ranks computed alike, or an earlier one"
            kind, message = ALIKE, f"step {update.step}: all ranks compute the same as others, bit by bit"
        if self._run.world.rank == 0 and requested:
            self._run.report(Finding(kind, message, update.step))

    def _check(self, run: Run, update: PendingUpdate) -> None:
        """
        Raises:
            BadDevice: see :meth:`titan_before_update`.
            UserError: ranks compute something else each time.
        """
        world, work = run.world, _Work(run, update)
        found = [(shift, work.repeated(shift, outputs=False)) for shift in (0, 1)]
        if not world.max(torch.tensor(int(not torch.equal(found[0][1], found[1][1])))):
            return
        shifts = (0, 1, 2) if len(work.ring) > 2 else (0, 1)
        found += [(shift, work.repeated(shift, outputs=False)) for shift in shifts]
        seen = [(shift, work.repeated(shift, outputs=True)) for shift in shifts]  # uncompiled: not to be mixed
        compared = dict(enumerate(world.gather([work.comparison(found), work.comparison(seen)])))
        suspects = [one for ring in work.rings if (one := suspects_in(ring, compared)) is not None]
        gathered = world.gather((_name(world.device), multiplies_exactly(world.device)))
        wrong = {rank for rank, (_, right) in enumerate(gathered) if not right}
        blamed = {rank for one in suspects for rank in one.ranks}
        blamed = blamed & wrong or wrong or blamed
        if not wrong and all(one.everywhere for one in suspects):
            why = f"every rank computes other gradients each time that it repeats step {update.step}"
            fix = "set training.deterministic = true, or numerics.replay_freq = 0: a module draws random numbers of its own"
            raise UserError.one(run.job.config.where("numerics.replay_freq"), why, fix)
        who = f"{'one of ' if len(blamed) > 1 and not wrong else ''}{ranks(blamed)}"
        where = "; ".join(dict.fromkeys(gathered[rank][0] for rank in sorted(blamed)))
        message = (
            f"step {update.step}: {who} ({where}) computes wrong numbers: of the same microbatches, with the same weights, "
            f"other ranks compute something else, first in {suspects[0].name}"
            f"{', and products of whole numbers are wrong' if wrong else ''}; leave the device out, and resume from a "
            f"checkpoint {self._passed or 'of an earlier run: no check has passed before'}"
        )
        if world.rank == 0:
            run.report(Finding(BAD, message, update.step))
        raise BadDevice(message, here=world.rank in blamed)


class _Work:
    """The forward and backward pass of a step, as this rank repeats it."""

    def __init__(self, run: Run, update: PendingUpdate) -> None:
        self._update, self._parts, self._device = update, run.parts, run.world.device
        # Parts of one rank have containers of the same name.
        self._modules = dict.fromkeys(name for part in run.parts for name, _ in part.named_modules() if name)
        self._names = [*self._modules, *(name for part in run.parts for name, _ in part.named_parameters())]
        self._calls: dict[str, int] = {}  # module -> in which order modules return first
        self.rings, rank = rings(run.world.plan), run.world.rank
        self.ring = next(ring for ring in self.rings if any(rank in group for group in ring))
        self._number = next(number for number, group in enumerate(self.ring) if rank in group)
        self._position = self.ring[self._number].index(rank)

    def repeated(self, shift: int, outputs: bool) -> Tensor:
        """Repeat the work of the rank that is ``shift`` groups after this one. Return the checksums that the rank as many
        groups before this one has found for the work of this rank."""
        after, before = (self.ring[(self._number + by) % len(self.ring)][self._position] for by in (shift, -shift))

        def passed(tensor: Tensor, to: int, sender: int) -> Tensor:
            return tensor if shift == 0 else _exchanged(tensor, to, sender)

        own = self._update.microbatches
        longest = torch.tensor([batch.longest_document for batch in own], device=self._device)
        lengths = passed(longest, before, after).tolist()
        batches = [
            replace(batch.map(lambda tensor: passed(tensor, before, after)), longest_document=length)
            for batch, length in zip(own, lengths, strict=True)
        ]
        return passed(self._checksums(batches, outputs), after, before)

    def _checksums(self, batches: Sequence[Batch], outputs: bool) -> Tensor:
        """Compute ``batches``, and return a checksum of each module's outputs (0 unless ``outputs``) and of each gradient of
        this rank, before it is added to those of other ranks."""
        places = {name: index for index, name in enumerate(self._names)}
        found = torch.zeros(len(places), dtype=torch.int64, device=self._device)

        @torch.no_grad()
        def add(name: str, tensor: Tensor) -> None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            place = found[places[name]]
            place.mul_(_FACTOR).add_(checksum(local))

        def on_output(name: str, module: nn.Module, tensors: list[Tensor]) -> None:
            self._calls.setdefault(name, len(self._calls))
            for tensor in tensors:
                add(name, tensor)

        with ExitStack() as stack:
            for name, leaf in _leaves(self._parts):
                handle = leaf.register_hook(lambda gradient, name=name: add(name, gradient))
                stack.callback(handle.remove)
            if outputs:
                stack.enter_context(observed_outputs(self._parts, on_output))
            stack.enter_context(self._update.repeat_backward(batches))
        return found

    def comparison(self, repeated: Sequence[tuple[int, Tensor]]) -> Comparison:
        """Compare the checksums of this rank's work, which the ranks so many groups before it found."""
        rows = torch.stack([checksums for _, checksums in repeated]).cpu()
        differences = {}
        for other in range(len(rows)):
            for one in range(other):
                if indices := (rows[one] != rows[other]).nonzero().flatten().tolist():
                    places = [self._place(index) for index in indices]
                    first = min(places)
                    differences[one, other] = Difference(first, self._names[indices[places.index(first)]])
        return Comparison(tuple(shift for shift, _ in repeated), differences)

    def _place(self, index: int) -> Place:
        name = self._names[index]
        stage, number = place_in_model(name, self._parts[0].layout)
        if index < len(self._modules):
            return 0, stage, number, self._calls.get(name, 0)
        return 1, -stage, -number, -index


def _leaves(parts: Sequence[ModelPart]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with the names of their parameters, whose gradients autograd computes on this rank: under FSDP
    whole parameters, which exist only while they are gathered, but are the same objects each time."""
    for part in parts:
        sharded = dict(part.named_parameters())
        found: dict[str, Tensor] = {**sharded}
        for path, module in part.named_modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                whole = module.named_parameters(path)
                found |= {name: one for name, one in whole if name in sharded and one is not sharded[name]}
                module.reshard()
        yield from ((name, one) for name, one in found.items() if one.requires_grad)


@torch.no_grad()
def _exchanged(tensor: Tensor, to: int, sender: int) -> Tensor:
    """Send ``tensor`` to a rank, and return that of another one, which has the same type and number of dimensions."""

    def exchanged(mine: Tensor, empty: Tensor) -> Tensor:
        sends, receives = (dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, empty, sender))
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return empty

    shape = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
    theirs = torch.empty(exchanged(shape, torch.empty_like(shape)).tolist(), dtype=tensor.dtype, device=tensor.device)
    exchanged(tensor.contiguous().flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))
    return theirs


def multiplies_exactly(device: torch.device) -> bool:
    """Whether ``device`` multiplies matrices of small whole numbers without an error. There is nothing to round, in whatever
    order and type it adds."""
    generator = torch.Generator().manual_seed(0)
    for number in range(_PRODUCTS):
        dtype, most = ((torch.float32, 100), (torch.bfloat16, 1))[number % 2]
        one, other = torch.randint(-most, most + 1, (2, _SIDE, _SIDE), generator=generator)
        found = one.to(device, dtype) @ other.to(device, dtype)
        if not torch.equal(found.cpu().long(), one @ other):
            return False
    return True


def _name(device: torch.device) -> str:
    """Return the host and, of a GPU, its number and identity."""
    of_gpu = f", {device} {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
    return f"{socket.gethostname()}{of_gpu}"
