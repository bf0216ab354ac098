"""Keeps the experts of each block equally busy, with the same loss, rows and biases on every mesh.

A router is a module that the layout names in ``routers``. It is called with tokens and returns the weights of the chosen
experts, their indices, and the scores of all experts (:class:`titan_core.api.Router`).

* ``sequence``: DeepSeek-V3, arXiv 2412.19437, section 2.1.2. Ranks that divide a sequence add up their counts, so the
  loss is a sum over positions.
* ``global``: the share of the rows that each expert received is that of the previous step's global batch. That of the
  current batch could not be exact: with several microbatches, the first backward pass precedes the last forward pass. The
  first step has equal shares, and no gradient.
* ``bias``: Wang et al., arXiv 2408.15664.

The z-loss is equation 5 of ST-MoE (Zoph et al., arXiv 2202.08906).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_core.api import (
    ModelPart,
    Record,
    Router,
    Run,
    RunEnd,
    StepReport,
    TrainingContext,
    add_auxiliary_loss,
    add_statistic,
    current_microbatch,
    hookimpl,
)
from titan_core.toolkit.json_lines import LineFile
from titan_experts.check_routers import bias_of, block_of, num_experts
from titan_experts.config import ExpertsSection

FILE = "debug/expert_rows.jsonl"
LOSS, Z_LOSS, ROWS = "expert_balance", "router_z_loss", "experts_rows"
"""Names of the losses, and of the statistic: rows of each expert, ``[blocks, experts]``; zeros for blocks without them."""


def apply(part: ModelPart, context: TrainingContext[ExpertsSection]) -> ModelPart:
    """Wrap each router of the part."""
    for path, module in part.named_modules():
        if (router := part.layout.router(path)) is not None:
            module.forward = BalancedRouter(path, module, router, part, context)
    part.statistics = {**part.statistics, ROWS: (part.layout.num_blocks, num_experts(part.layout))}
    if context.section.balance in ("sequence", "global"):
        part.auxiliary_losses += (LOSS,)
    if context.section.z_loss_weight:
        part.auxiliary_losses += (Z_LOSS,)
    return part


class BalancedRouter:
    """Replaces the forward of a router: counts the rows of each expert, and adds losses."""

    def __init__(
        self, path: str, module: nn.Module, router: Router, part: ModelPart, context: TrainingContext[ExpertsSection]
    ) -> None:
        self.module, self._inner, self._section = module, module.forward, context.section
        self.bias = router.bias
        self.block = block_of(path, part.layout)
        self.previous = torch.zeros(num_experts(part.layout), dtype=torch.int64, device=context.device)
        """Rows of each expert of the block in the previous step; the observer keeps it."""
        dims = [dim for dim in context.job.mesh.dims if dim.name in context.mesh]
        self._sequence = [context.mesh[dim.name] for dim in dims if dim.divides == "sequence"]
        self._weights = [context.mesh[dim.name] for dim in dims if dim.divides == "weights"]
        self._seq_len = context.job.batch.seq_len
        if context.section.z_loss_weight:
            logits = module.get_submodule("logits")
            logits.forward = partial(self._with_z_loss, logits.forward)
        if context.section.force_balanced:
            module.get_submodule("choice").forward = chosen_by_turns(module.get_submodule("choice"))

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """
        Args:
            tokens: ``[positions, dim]`` or ``[batch, seq, dim]``.
        """
        weights, chosen, scores = self._inner(tokens)
        microbatch = current_microbatch()
        if microbatch is None or microbatch.auxiliary is None:
            return weights, chosen, scores
        sequences = microbatch.batch.tokens.shape[0]
        chosen_of = chosen.reshape(sequences, -1, chosen.shape[-1])  # [batch, positions, experts of a token]
        experts = torch.arange(scores.shape[-1], device=chosen.device)
        # [batch, experts]: tokens of a sequence that chose an expert.
        rows = torch.stack([(chosen_of[..., which, None] == experts).sum(1) for which in range(chosen.shape[-1])]).sum(0)
        divided = self._is_divided(chosen_of.shape[1])
        weights = self._counted(weights, rows.sum(0), divided)
        if self._section.balance in ("sequence", "global"):
            shares = self._shares(rows, chosen.shape[-1], divided)
            affinities = scores.reshape(sequences, -1, scores.shape[-1])
            affinities = affinities / affinities.sum(-1, keepdim=True)
            loss = self._section.balance_weight * scores.shape[-1] * (affinities * shares[:, None]).sum()
            weights = add_auxiliary_loss(weights, LOSS, loss, divided=divided)
        return weights, chosen, scores

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # with the number of the block, each would be compiled anew
    def _counted(self, weights: Tensor, rows: Tensor, divided: bool) -> Tensor:
        return add_statistic(weights, ROWS, rows, index=self.block, divided=divided)

    def _with_z_loss(self, inner: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
        """
        Args:
            inner: the forward of the module ``logits`` of the router.
            logits: fp32 ``[positions, experts]``.
        """
        logits, microbatch = inner(logits), current_microbatch()
        if microbatch is None or microbatch.auxiliary is None:
            return logits
        loss = self._section.z_loss_weight * logits.logsumexp(-1).square().sum()
        divided = self._is_divided(logits.shape[0] // microbatch.batch.tokens.shape[0])
        return add_auxiliary_loss(logits, Z_LOSS, loss, divided=divided)

    def _is_divided(self, positions: int) -> bool:
        """Whether ranks that divide weights have different positions, as under sequence parallelism."""
        ranks = 1
        for mesh in self._sequence:
            ranks *= mesh.size()
        return positions * ranks < self._seq_len

    def _shares(self, rows: Tensor, per_token: int, divided: bool) -> Tensor:
        """Return the shares of the experts in the rows of each sequence, ``[batch, experts]``; of all: ``[1, experts]``."""
        if self._section.balance == "global":
            return balanced_shares(self.previous)[None]
        meshes: list[DeviceMesh] = [*self._sequence, *(self._weights if divided else ())]
        for mesh in meshes:
            dist.all_reduce(rows, group=mesh.get_group())
        return rows / (self._seq_len * per_token)


def balanced_shares(rows: Tensor) -> Tensor:
    """Return the share of each expert in ``rows``, int64 ``[experts]``, in fp32; equal ones if there are none."""
    total = rows.sum()
    return torch.where(total > 0, rows / total.clamp(min=1), 1.0 / rows.shape[0])


def chosen_by_turns(choice: nn.Module) -> Any:
    """Return a function that gives each token the next experts, as many as ``choice`` chooses."""
    per_token: int = choice.per_token  # type: ignore[assignment]

    def choose(scores: Tensor) -> Tensor:
        turns = torch.arange(scores.shape[0] * per_token, device=scores.device)
        return (turns % scores.shape[-1]).view(-1, per_token)

    return choose


class ExpertLoads:
    """Keeps the rows of the experts of the previous step, changes the biases, and reports how busy experts are."""

    def __init__(self, parts: Sequence[ModelPart], context: TrainingContext[ExpertsSection]) -> None:
        self._section = context.section
        layout = context.job.model.layout
        self._rows = torch.zeros(layout.num_blocks, num_experts(layout), dtype=torch.int64, device=context.device)
        self._routers = list(_routers(parts))
        self._file: LineFile | None = None
        for router in self._routers:
            router.previous = self._rows[router.block]  # a view, so that a restored checkpoint reaches it

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Choose the file of the rows of logged steps, which ``titan report`` draws."""
        self._file = LineFile(Path(run.dump_folder) / FILE)

    @hookimpl
    def titan_train_end(self, end: RunEnd) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @hookimpl
    def titan_state_tensors(self) -> dict[str, Tensor]:
        """Return the rows, from which "global" computes its loss."""
        return {"experts.rows": self._rows}

    @hookimpl
    @torch.no_grad()
    def titan_step_end(self, report: StepReport) -> None:
        """Take the rows of the step, unless its update was skipped. Nothing here waits for the device."""
        found, skipped = report.statistics[ROWS], report.skipped
        if skipped is True:
            return
        taken: Tensor | int = 1 if skipped is False else (~skipped).long()
        self._rows += taken * (found - self._rows)
        if self._section.balance == "bias":
            for router in self._routers:
                rows = found[router.block]
                few = torch.sign(rows.sum() - rows * rows.shape[0])  # exact, so that every mesh has the same biases
                bias = bias_of(router.module, router.bias)
                assert bias is not None, "the check of the model has required one"
                bias += self._section.bias_rate * (taken * few)

    @hookimpl
    def titan_figures(self, record: Record) -> dict[str, float]:
        """Return, over the blocks with experts, the most rows of an expert relative to the mean, the experts without rows,
        and the least entropy of the shares, 1 if all experts are equally busy."""
        every = self._rows.cpu()
        if self._file is not None:
            self._file.append({"step": record["step"], "rows": every.tolist()})
        rows, has_experts = every.double(), every.sum(1) > 0
        shares = rows / rows.sum(1, keepdim=True).clamp(min=1)
        entropy = -torch.xlogy(shares, shares).sum(1) / torch.tensor(float(rows.shape[1])).log()
        return {
            "experts/busiest": (shares.amax(1) * rows.shape[1]).max().item(),
            "experts/unused": float(((rows == 0).sum(1) * has_experts).sum().item()),
            "experts/entropy": torch.where(has_experts, entropy, 1.0).min().item(),
        }


def _routers(parts: Sequence[ModelPart]) -> Iterator[BalancedRouter]:
    for part in parts:
        for _, module in part.named_modules():
            if isinstance(router := module.forward, BalancedRouter):
                yield router
