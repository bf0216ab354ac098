"""Activations in host memory: what a block saves for backward is copied there after its forward pass, and fetched while
backward computes the block after it (vDNN, Rhu et al., arXiv 1602.08124).

Autograd's hooks of saved tensors need nothing of the model. Blocks that recompute save their input and what selective
recomputation keeps; compiled blocks save what the compiler selects. Parameters, and what data parallelism has gathered of
them, stay on the device, as does the last block of a part, in which backward begins.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan_core.api import ModelPart, TrainingContext
from titan_core.api.parallel.step import is_shape_inference
from titan_parallel.config import ActivationOffloadKeys, CompileSection
from titan_parallel.host_memory import HostMemory, Stored
from titan_parallel.torch_private import saved_tensor_hooks, version_of

LEAST = 4096
"""Bytes of the smallest memory that is worth two copies."""


def apply(part: ModelPart, context: TrainingContext[ActivationOffloadKeys]) -> ModelPart:
    """Let blocks keep what they save for backward in host memory."""
    blocks = list(part.blocks().values())
    chosen = offloaded(len(blocks), context.section.offload_share)
    offload = Offload(context.device)
    compiled = context.job.section(CompileSection).compiles_blocks
    for number, block in enumerate(blocks if chosen else ()):
        hooks = _BlockHooks(offload, number, number in chosen)
        begin: Any = hooks.begin
        end: Any = hooks.end
        if compiled:  # compiled code honours hooks of saved tensors that it finds, and does not set any
            begin, end = torch.compiler.disable(begin), torch.compiler.disable(end)
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, with_kwargs=True, always_call=True)
    return part


def offloaded(blocks: int, share: float) -> frozenset[int]:
    """Return the numbers of the blocks to offload: a share of all but the last, evenly spaced, so that the copies of each
    have the time of several blocks."""
    number = math.ceil(share * max(0, blocks - 1))
    return frozenset(index * (blocks - 1) // number for index in range(number))


class Offload:
    """What all blocks of a part have in common."""

    def __init__(self, device: torch.device) -> None:
        self.host = HostMemory(device)
        self.last: BlockPass | None = None
        """The latest pass through a block that is offloaded."""
        self._sending: tuple[BlockPass, Any] | None = None

    def send(self, sender: BlockPass, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to the host what ``sender`` holds on the device."""
        self.release()
        self._sending, self.last = (sender, self.host.send(pairs)), sender

    def release(self) -> None:
        """Let go of what was sent last: when something else is sent, or backward begins."""
        if self._sending is not None:
            (sender, event), self._sending = self._sending, None
            self.host.wait_for(event)
            sender.release()


class _BlockHooks:
    """The hooks of a block's forward pass."""

    def __init__(self, offload: Offload, number: int, offloads: bool) -> None:
        self._offload, self._number, self._offloads = offload, number, offloads
        self._current: tuple[saved_tensors_hooks, BlockPass] | None = None

    def begin(self, *arguments: object) -> None:
        """Begin to receive what the block saves."""
        if torch.is_grad_enabled() and not is_shape_inference() and saved_tensor_hooks() is None:
            last = self._offload.last
            # One of a later block, or of this one, belongs to another microbatch.
            before = last if last is not None and last.number < self._number else None
            current = BlockPass(self._offload, self._number, before)
            hooks = saved_tensors_hooks(current, BlockPass.unpack)
            hooks.__enter__()
            self._current = hooks, current

    def end(self, block: nn.Module, arguments: Any, keywords: Any, output: object) -> None:
        """Send what the block has saved; called on errors too."""
        if self._current is None:
            return
        (hooks, current), self._current = self._current, None
        hooks.__exit__()
        if self._offloads:
            # Inputs without a gradient, such as rotary tables, are those of all blocks.
            inputs = (one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor) and not one.requires_grad)
            stay = _plain((*inputs, *block.parameters(), *block.buffers()))
            current.send({id(one.untyped_storage()) for one in stay})
        else:
            current.release()


class BlockPass:
    """What one call of a block saves. As a function, it is a hook of saved tensors."""

    def __init__(self, offload: Offload, number: int, before: BlockPass | None) -> None:
        """
        Args:
            number: of the block.
            before: the latest pass of this microbatch through a block that is offloaded.
        """
        self.number = number
        self._offload, self._before = offload, before
        self._saved: list[_Saved] = []
        self._stored: list[weakref.ref[Stored]] = []
        self._is_sent = self._reached = False

    def __call__(self, tensor: Tensor) -> _Saved:
        """Return what autograd saves in place of ``tensor``."""
        saved = _Saved(self, tensor.detach())
        self._saved.append(saved)
        return saved

    @staticmethod
    def unpack(saved: _Saved) -> Tensor:
        """Return the tensor that was saved.

        Raises:
            RuntimeError: it was changed in place.
        """
        saved.owner.reach()
        return saved.value()

    def send(self, stay: set[int]) -> None:
        """Copy to the host what was saved, but storages in ``stay``, small ones, masks and indices."""
        stored: dict[int, Stored] = {}
        pairs = []
        for saved in self._saved:
            tensor = saved.tensor
            if tensor is None or not _may_leave(tensor, self._offload.host.device) or saved.is_changed:
                continue
            storage = tensor.untyped_storage()
            if (key := id(storage)) in stay or storage.nbytes() < LEAST:
                continue
            if key not in stored:
                # The whole storage, once: tensors that share it also share the copy.
                source = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8)
                stored[key] = Stored(self._offload.host, source)
                pairs.append((stored[key].on_host, source))
            saved.stored = stored[key]
        self._is_sent, self._stored = True, [weakref.ref(one) for one in stored.values()]
        self._offload.send(self, pairs)

    def release(self) -> None:
        """Let go of the tensors that are on the host."""
        for saved in self._saved:
            saved.release()
        self._saved = []

    def reach(self) -> None:
        """Note that backward has reached the block: it needs what the block has saved, and next what the one before has."""
        if not self._reached:
            self._reached = True
            self._offload.release()
            if self._is_sent:
                self.fetch()
                self._offload.host.arrive()
            if self._before is not None:
                self._before.fetch()

    def fetch(self) -> None:
        """Fetch what is still needed, the first time."""
        alive = [one for reference in self._stored if (one := reference()) is not None]
        self._stored = []
        if alive:
            self._offload.host.fetch([one.fetched() for one in alive])


class _Saved:
    """Stands for a tensor that autograd has saved."""

    def __init__(self, owner: BlockPass, tensor: Tensor) -> None:
        self.owner = owner
        self.tensor: Tensor | None = tensor
        """``None`` once it is only :attr:`stored`."""
        self.stored: Stored | None = None
        self._version = version_of(tensor)
        self._was_changed = False
        self._place = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._dtype = tensor.dtype

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was changed in place, before it was on the host. Autograd compares versions only of what it has
        saved itself."""
        return self._was_changed or (self.tensor is not None and version_of(self.tensor) != self._version)

    def release(self) -> None:
        """Let go of a tensor that is on the host."""
        if self.stored is not None:
            self._was_changed = self.is_changed  # while it was copied
            self.tensor = None

    def value(self) -> Tensor:
        """Return the tensor, or another with its elements.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self.is_changed:
            shape = tuple(self._place[0])
            raise RuntimeError(f"a tensor of shape {shape} that a block has saved for backward was changed in place since")
        if self.tensor is not None:
            return self.tensor
        assert self.stored is not None and self.stored.on_device is not None
        return self.stored.on_device.view(self._dtype).as_strided(*self._place)


def _may_leave(tensor: Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` holds plain numbers of the device, those of low precision packed into bytes included. Sizes may
    depend on others: masks, indices, counts."""
    numbers = tensor.is_floating_point() or tensor.dtype is torch.uint8
    plain = tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__") and not tensor.is_neg()
    return numbers and plain and tensor.device.type == device.type


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield ``tensors``; of one that consists of others, such as a DTensor, those."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _plain(one for one in inner if isinstance(one, Tensor))  # torch 2.15 names a DTensor's mesh, too
        else:
            yield tensor
