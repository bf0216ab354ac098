"""Muon orthogonalises the momentum of hidden matrices before it applies it, and updates all other parameters with AdamW
(Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., arXiv 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_core.api import OptimizerContext, OptimizerSection
from titan_core.toolkit.optimizers import OnLocalShards, step_unless
from titan_optim.config import MuonSection
from titan_optim.exchange import Item, Round, Route, route_key
from titan_optim.matrices import Matrices, chosen_matrices


def build(context: OptimizerContext[MuonSection]) -> Muon:
    """Build Muon, with matrices selected by their role in the model's layout."""
    shared = context.job.section(OptimizerSection)
    found = chosen_matrices(context)
    groups = []
    for group in context.groups:
        rest = [parameter.tensor for parameter in group.parameters if parameter.tensor not in found]
        groups.append({**group.as_dict(shared.lr), "params": rest, "muon": False})
    for group in context.groups:
        chosen = [parameter.tensor for parameter in group.parameters if parameter.tensor in found]
        groups.append({**group.as_dict(context.section.lr), "params": chosen, "muon": True})
    # Of torch's implementations of AdamW, the fused one can skip a step on the device.
    kind = SkippableMuon if shared.implementation in ("auto", "fused") else Muon
    # On a pipeline stage, some groups may have no parameters, and none may have some.
    filled = [group for group in groups if group["params"]] or groups[:1]
    return kind(filled, found, context.section, shared, context.device)


class LocalAdamW(OnLocalShards, torch.optim.AdamW):
    """torch's AdamW, computed on this rank's shards."""


class Muon(Optimizer):
    """A single optimizer for both kinds of parameters, as schedules and checkpoints expect.

    The update of a matrix depends on all of it. One rank computes it, from the shards that the others send
    (:mod:`titan_optim.exchange`). The momentum is divided like the parameter.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        matrices: dict[nn.Parameter, Matrices],
        section: MuonSection,
        shared: OptimizerSection,
        device: torch.device,
    ) -> None:
        """
        Args:
            groups: parameter groups, ``muon`` if their parameters are ``matrices``. Others come first, because the learning
                rate of the first group is logged.
            shared: settings of AdamW.
            device: where to iterate, even if parameters are on the host.
        """
        self._matrices, self._section, self._device = matrices, section, device
        self._dtype = torch.bfloat16 if section.dtype == "bfloat16" else torch.float32
        self._adamw: LocalAdamW | None = None
        self._skip: Tensor | None = None  # of a step of SkippableMuon
        self._planned: tuple[list[nn.Parameter], list[tuple[Route, list[Round]]]] | None = None
        super().__init__(groups, {})
        if self._groups(muon=False):
            # AdamW shares its groups and state with this optimizer, and adds its own settings to each group.
            self._adamw = LocalAdamW(
                self._groups(muon=False),
                betas=(shared.beta1, shared.beta2),
                eps=shared.eps,
                fused=shared.implementation in ("auto", "fused"),
                foreach=shared.implementation == "foreach",
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters. Collective: ranks that hold shards or replicas of a matrix call it together, and either all
        or none of them have its gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_matrices()  # first: hooks after the inner optimizer's step then find all of the state
        if self._adamw is not None:
            # Assign both in every step, because loading a state dict replaces them.
            self._adamw.state, self._adamw.param_groups = self.state, self._groups(muon=False)
            if self._skip is None:
                self._adamw.step()
            else:
                step_unless(self._adamw, self._skip)
        return loss

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] is muon]

    def _update_matrices(self) -> None:
        gradients: dict[Matrices, Tensor] = {}
        momenta: dict[Matrices, Tensor] = {}
        settings: dict[Matrices, dict[str, Any]] = {}
        for group in self._groups(muon=True):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                matrices = self._matrices[parameter]
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                gradient, momentum = (matrices.local(one) for one in (_like(parameter.grad, parameter), state["momentum"]))
                gradient = gradient if self._skip is None else torch.where(self._skip, momentum, gradient)
                momentum.lerp_(gradient, 1 - self._section.momentum)
                gradients[matrices], momenta[matrices], settings[matrices] = gradient, momentum, group

        def direction(item: Item) -> Tensor:
            """Return this rank's shard of what is orthogonalised, in the type of the iterations, which exchanges halve."""
            momentum = momenta[item.matrices][item.index]
            if self._section.nesterov:
                momentum = gradients[item.matrices][item.index].lerp(momentum, self._section.momentum)
            return momentum.to(self._device, self._dtype)

        like = torch.empty(0, dtype=self._dtype, device=self._device)
        for route, rounds in self._plan(gradients):
            for items in rounds:
                owned = self._orthogonalized(route.gather(items, direction))
                for item, update in route.scatter(items, owned, like).items():
                    self._apply(item, update, settings[item.matrices])

    def _plan(self, gradients: dict[Matrices, Tensor]) -> list[tuple[Route, list[Round]]]:
        """Return the exchanges of a step: the same in each, while the same parameters have gradients."""
        trained = [matrices.parameter for matrices in gradients]
        if self._planned is None or [*map(id, self._planned[0])] != [*map(id, trained)]:
            by_route: dict[object, list[Matrices]] = {}
            for matrices in gradients:
                by_route.setdefault(route_key(matrices), []).append(matrices)
            routes = [(Route(some[0]), some) for some in by_route.values()]
            size = self._section.buffer_mib * 2**20
            self._planned = trained, [(route, route.rounds(some, size)) for route, some in routes]
        return self._planned[1]

    def _orthogonalized(self, owned: dict[Item, Tensor]) -> dict[Item, Tensor]:
        """Return the updates of whole matrices, those of the same shape computed together, without their scale."""
        alike: dict[object, list[Item]] = {}
        for item in owned:
            alike.setdefault((item.matrices.shape, item.matrices.parts), []).append(item)
        found: dict[Item, Tensor] = {}
        for items in alike.values():
            stacked = torch.stack([owned[item] for item in items])
            updates = orthogonalized_parts(stacked, items[0].matrices.parts, self._section.steps, self._section.scale)
            found |= dict(zip(items, updates, strict=True))
        return found

    def _apply(self, item: Item, update: Tensor, group: dict[str, Any]) -> None:
        matrices = item.matrices
        lr, weight_decay = group["lr"], group["weight_decay"]
        scale = max(update_scale(rows, matrices.shape[1], self._section.scale) for rows in matrices.parts)
        parameter = matrices.local(matrices.parameter.detach())[item.index]
        update = update.to(parameter.device, parameter.dtype)
        if self._skip is None:
            parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)
        else:
            new = torch.mul(parameter, 1 - lr * weight_decay).add_(update, alpha=-lr * scale)
            parameter.copy_(torch.where(self._skip.to(parameter.device), parameter, new))


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


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient divided like its parameter."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5, which moves singular values in (0, 1] close to 1 in a few iterations
(Jordan, 2024)."""
EPS = 1e-7


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Approximate ``U V^T`` for each matrix ``U S V^T`` of ``matrices``, ``[n, rows, columns]``, in their data type."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT  # multiply along the shorter side
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)  # singular values are at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def orthogonalized_parts(matrices: Tensor, parts: tuple[int, ...], steps: int, rule: str) -> Tensor:
    """Return :func:`orthogonalized` of each of the ``parts`` that matrices ``[n, rows, columns]`` consist of.

    Args:
        parts: rows of each part. If their scales differ, the results are in proportion; the largest has factor 1.
        rule: see :func:`update_scale`.
    """
    if len(parts) == 1:
        return orthogonalized(matrices, steps)
    columns = matrices.shape[2]
    scales = [update_scale(rows, columns, rule) for rows in parts]
    found = [
        orthogonalized(part, steps) * (scale / max(scales))
        for part, scale in zip(matrices.split(parts, dim=1), scales, strict=True)
    ]
    return torch.cat(found, dim=1)


def update_scale(rows: int, columns: int, rule: str) -> float:
    """Return the factor that ``muon.scale = rule`` gives a matrix of shape ``[rows, columns]``."""
    return math.sqrt(max(1.0, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns))
