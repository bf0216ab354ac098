"""AdamW whose running means are kept in bfloat16, rounded stochastically.

With the nearest rounding, a running mean does not move any more once its changes are smaller than half a step of bfloat16,
1/512 of its value: with ``beta2 = 0.999``, that of squared gradients never decays. Stochastic rounding is right on average
(Gupta et al., "Deep learning with limited numerical precision", arXiv 1502.02551; Zamirai et al., "Revisiting BFloat16
training", arXiv 2010.06192). Its bits are a function of seed, step, parameter and element, so that state is the same on any
mesh, and after resuming.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_core.api import OptimizerContext, OptimizerSection
from titan_core.api.config.sections import TrainingSection
from titan_core.api.model.random_streams import element_bits, feature_words, mixed, of_module, token_words
from titan_core.toolkit.optimizers import global_offset

CHUNK = 2**23
"""Elements that are updated at a time, which bounds the memory of their values in fp32 to some 400 MiB."""
CHUNK_ON_CPU = 2**16
"""The same on the CPU, where their values fit into a cache: 13 ns an element instead of 48 for 2^20."""


def build(context: OptimizerContext[None]) -> AdamWBF16:
    """Build AdamW with bfloat16 state."""
    shared = context.job.section(OptimizerSection)
    names = {parameter.tensor: parameter.name for group in context.groups for parameter in group.parameters}
    return AdamWBF16(
        [group.as_dict(shared.lr) for group in context.groups],
        names,
        betas=(shared.beta1, shared.beta2),
        eps=shared.eps,
        seed=context.job.section(TrainingSection).seed,
    )


class AdamWBF16(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with ``exp_avg`` and ``exp_avg_sq`` in bfloat16. A step is computed in fp32, from
    values that are not rounded yet. It can skip a step on the device (:class:`~titan_core.api.SkipsOnDevice`)."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[nn.Parameter, str],
        *,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        """
        Args:
            groups: with ``lr`` and ``weight_decay``.
            names: fully qualified names.
            seed: of the random bits.
        """
        super().__init__(groups, {"betas": betas, "eps": eps})
        self._seed = seed
        self._keys = {parameter: _key(name) for parameter, name in names.items()}
        self._skip: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def step_unless(self, skip: Tensor) -> None:
        """Update all parameters unless ``skip``, a flag on the device, is true."""
        self._skip = skip
        try:
            self.step()  # torch's schedules notice this call
        finally:
            self._skip = None

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        taken = torch.ones_like(state["step"]) if self._skip is None else (~self._skip).to(state["step"])
        state["step"].add_(taken)
        shards = [_local(one) for one in (parameter.detach(), gradient, state["exp_avg"], state["exp_avg_sq"])]
        if shards[0].numel() == 0:
            return
        columns = shards[0].shape[-1] if shards[0].dim() else 1
        rows, first = _rows(parameter, shards[0]), _first_column(parameter)
        step = state["step"]
        key = mixed(torch.full((), self._seed, dtype=torch.int64, device=step.device)) ^ step.to(torch.int64)
        features = feature_words(torch.full_like(key, self._keys[parameter]), first, columns)
        scales = _Scales(step, group)
        at_once = max(1, (CHUNK_ON_CPU if parameter.device.type == "cpu" else CHUNK) // columns)
        for top in range(0, len(rows), at_once):
            some = rows[top : top + at_once]
            words = of_module(
                torch.full_like(key, self._keys[parameter]), token_words(key, some, torch.zeros_like(some[:1])), features
            )
            self._update_rows([one.view(-1, columns)[top : top + at_once] for one in shards], element_bits(words), scales)

    def _update_rows(self, shards: list[Tensor], bits: Tensor, scales: _Scales) -> None:
        """Update rows of a parameter and its state. ``bits``: 31 random bits of each element."""
        values, gradient, first, second = shards
        gradient = gradient.float()
        mean = first.float().lerp_(gradient, 1 - scales.beta1)
        square = second.float().mul_(scales.beta2).addcmul_(gradient, gradient, value=1 - scales.beta2)
        denominator = (square.sqrt() / scales.correction).add_(scales.eps)
        new = (values * scales.kept).sub_(mean.div(denominator).mul_(scales.rate))
        results = (new, rounded(mean, bits & 0xFFFF), rounded(square, (bits >> 15) & 0xFFFF))
        for old, result in zip((values, first, second), results, strict=True):
            old.copy_(result if self._skip is None else torch.where(self._skip.to(old.device), old, result.to(old.dtype)))


class _Scales:
    """Factors of a step. Those that depend on its number are on the device, which alone knows how many it skipped."""

    def __init__(self, step: Tensor, group: dict[str, Any]) -> None:
        self.beta1, self.beta2 = group["betas"]
        self.eps: float = group["eps"]
        self.kept = 1 - group["lr"] * group["weight_decay"]
        taken = step.double()  # in fp32, 1 - 0.999 would have four digits
        self.correction = (1 - self.beta2**taken).sqrt()
        self.rate = group["lr"] / (1 - self.beta1**taken)


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 ``values`` to bfloat16: up with the probability of the part that is cut off.

    Args:
        bits: 16 random bits of each element, int32.
    """
    up = ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return the number of each row of this rank's shard in the whole parameter, int64 ``[rows]``: all dimensions but the
    last are counted together."""
    offset = global_offset(parameter) if isinstance(parameter, DTensor) else (0,) * parameter.dim()
    found = torch.zeros(1, dtype=torch.int64, device=shard.device)
    for first, size, whole in zip(offset[:-1], shard.shape[:-1], parameter.shape[:-1], strict=True):
        found = (found[:, None] * whole + torch.arange(first, first + size, device=shard.device)).flatten()
    return found


def _first_column(parameter: Tensor) -> int:
    return global_offset(parameter)[-1] if isinstance(parameter, DTensor) and parameter.dim() else 0
