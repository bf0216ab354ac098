"""Muon orthogonalises the momentum of hidden matrices before it applies it, and updates all other parameters with AdamW
(Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from titan_core.api import OptimizerContext, OptimizerSection, ParameterRole
from titan_optim_muon.config import MuonSection

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5, which moves singular values in (0, 1] close to 1 in a few iterations
(Jordan, 2024)."""
EPS = 1e-7
MATRIX = ParameterRole.HIDDEN_MATRIX
OTHERS = [role for role in ParameterRole if role is not MATRIX]


def build(context: OptimizerContext[MuonSection]) -> Muon:
    """Build Muon, with hidden matrices selected by their role in the model's layout."""
    shared = context.job.section(OptimizerSection)
    matrices, others = [], []
    for group in context.groups:
        matrices.append(group.as_dict(context.section.lr, MATRIX))
        others.append(group.as_dict(shared.lr, *OTHERS))
    # Of torch's implementations of AdamW, the fused one can skip a step on the device.
    chosen = SkippableMuon if shared.implementation in ("auto", "fused") else Muon
    hidden = nonempty(matrices)
    # A rank whose pipeline stages are frozen has no parameter to train, and an optimizer needs a group.
    return chosen(hidden, nonempty(others) or ([] if hidden else others[:1]), context.section, shared)


def nonempty(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups that have parameters. On a pipeline stage, some may have none."""
    return [group for group in groups if group["params"]]


class Muon(Optimizer):
    """A single optimizer for both kinds of parameters, as schedules and checkpoints expect.

    The update depends on the whole matrix. A matrix that is divided over ranks is therefore gathered; each rank computes the
    whole update and applies its own part, so updates are the same on every mesh. The momentum is divided like the parameter.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], section: MuonSection, shared: OptimizerSection
    ) -> None:
        """
        Args:
            matrices: parameter groups of hidden matrices.
            others: parameter groups of all other parameters.
            shared: settings of AdamW.
        """
        self._section = section
        self._adamw: AdamW | None = None
        self._skip: Tensor | None = None  # of a step of SkippableMuon
        # The others come first, because the learning rate of the first group is logged.
        groups = [{**group, "muon": False} for group in others] + [{**group, "muon": True} for group in matrices]
        super().__init__(groups, {})
        if others:
            # AdamW shares its groups and state with this optimizer, and adds its own settings to each group.
            self._adamw = AdamW(
                self._groups(muon=False),
                betas=(shared.beta1, shared.beta2),
                eps=shared.eps,
                fused=shared.implementation in ("auto", "fused"),
                foreach=shared.implementation == "foreach",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._adamw is not None:
            # Assign both in every step, because loading a state dict replaces them.
            self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
            with skipping(self._adamw, self._skip):
                self._adamw.step()
        for group in self._groups(muon=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])
        return loss

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    def _update(self, parameter: nn.Parameter, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state, section, skip = self.state[parameter], self._section, self._skip
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        before = None if skip is None else [local(tensor).clone() for tensor in (parameter, state["momentum"])]
        momentum = state["momentum"].lerp_(gradient, 1 - section.momentum)
        direction = gradient.lerp(momentum, section.momentum) if section.nesterov else momentum
        update = sharded_like(parameter, orthogonalized(gathered(direction), section.steps, getattr(torch, section.dtype)))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update.to(parameter.dtype), alpha=-lr * update_scale(parameter.shape, section.scale))
        if skip is not None and before is not None:
            for tensor, old in zip((parameter, momentum), before, strict=True):
                local(tensor).copy_(torch.where(skip, old, local(tensor)))


class SkippableMuon(Muon):
    """Muon that can skip a step on the device (:class:`~titan_core.api.SkipsOnDevice`), so that the host does not
    wait for each step to know whether its loss is finite."""

    def step_unless(self, skip: Tensor) -> None:
        """Update all parameters unless ``skip``, a flag on the device, is true."""
        self._skip = skip
        try:
            self.step()  # rather than a part of it: torch's schedules notice this call
        finally:
            self._skip = None


@contextmanager
def skipping(fused: AdamW, skip: Tensor | None) -> Iterator[None]:
    """Let a step within the ``with`` block change nothing if ``skip`` is true, in the way of ``torch.amp.GradScaler``."""
    if skip is None:
        yield
        return
    state: Any = fused
    state.grad_scale, state.found_inf = None, skip.float()
    try:
        yield
    finally:
        del state.grad_scale, state.found_inf


def orthogonalized(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Approximate ``U V^T`` for ``matrix = U S V^T``, ``[rows, columns]``, with Newton-Schulz iterations in ``dtype``."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)  # multiply along the shorter side
    x = x / x.norm().clamp(min=EPS)  # singular values are at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def update_scale(shape: torch.Size, rule: str) -> float:
    """Return the factor that ``gathered_muon.scale = rule`` gives a matrix of shape ``[rows, columns]``."""
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of ``tensor`` on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Shard ``whole``, which every rank has, like ``parameter``. Requires no communication."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)
