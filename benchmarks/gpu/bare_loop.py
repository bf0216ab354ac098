"""A training loop in plain torch, as a careful user would write it for one device: what Titan is measured against.

The model is the same ``nn.Module``. In bf16, forward and backward use a bf16 copy of the weights, and AdamW updates fp32
weights: the numerics of FSDP's mixed precision without its machinery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Compilation = Literal["none", "blocks", "model"]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of ``logits`` ``[batch, seq, vocabulary]``, computed in fp32; -100 marks no target."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


class BareLoop:
    """Trains ``model``, whose fp32 weights are on the device, by AdamW with clipping."""

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        compilation: Compilation = "none",
        blocks: Iterable[nn.Module] = (),
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float = 1.0,
        backend: str = "inductor",
    ) -> None:
        """
        Args:
            dtype: the type of the weights in forward and backward.
            compilation: compile nothing, each of ``blocks`` and the loss, or the whole model with the loss as one graph.
            backend: of ``torch.compile``.
        """
        self._max_norm = max_norm
        self._weights = list(model.parameters())
        self._masters = self._weights
        if dtype != torch.float32:
            self._masters = [weight.detach().clone() for weight in self._weights]
            for weight in self._weights:  # buffers, such as rotary tables, stay exact
                weight.data = weight.data.to(dtype)
        matrices = [master for master in self._masters if master.ndim >= 2]
        vectors = [master for master in self._masters if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._loss = _loss_function(model, compilation, blocks, backend)

    def step(self, tokens: Tensor, targets: Tensor, lr: float | None = None) -> tuple[Tensor, Tensor]:
        """Take one step on a batch, ``[batch, seq]``; return its loss and its gradient norm before clipping."""
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        loss = self._loss(tokens, targets)
        loss.backward()
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._max_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._masters is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._masters)
        return loss.detach(), norm


def _loss_function(
    model: nn.Module, compilation: Compilation, blocks: Iterable[nn.Module], backend: str
) -> Callable[[Tensor, Tensor], Tensor]:
    loss: Callable[..., Any] = next_token_loss
    if compilation == "blocks":
        for block in blocks:
            block.compile(backend=backend)
        loss = torch.compile(loss, backend=backend)

    def compute(tokens: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = loss(model(tokens), targets)
        return result

    return torch.compile(compute, backend=backend) if compilation == "model" else compute
