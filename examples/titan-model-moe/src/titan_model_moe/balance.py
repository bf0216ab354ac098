"""A loss that keeps experts equally busy. For each sequence, it sums over experts the share of tokens that chose the expert
times the expert's mean probability (Fedus et al., "Switch Transformers", arXiv 2101.03961, section 2.2; by sequence as in
DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Once the shares are known, the loss of a sequence is a sum over its positions. Ranks that divide a sequence therefore add up
their counts, and the loss is the same on any mesh.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from titan_core.api import ModelPart, TrainingContext, add_auxiliary_loss, current_microbatch
from titan_model_moe.config import ExpertBalanceSection
from titan_model_moe.model import FeedForward

NAME = "expert_balance"


def apply(part: ModelPart, context: TrainingContext[ExpertBalanceSection]) -> ModelPart:
    """Add the loss to each of this rank's blocks."""
    for _, module in part.named_modules():
        if isinstance(module, FeedForward):
            module.balance = ExpertBalance(context)
    part.auxiliary_losses += (NAME,)
    return part


class ExpertBalance:
    """The loss of one block. If all experts are equally busy, it is 1 for each position, times the weight."""

    def __init__(self, context: TrainingContext[ExpertBalanceSection]) -> None:
        self._weight = context.section.weight
        self._seq_len = context.job.batch.seq_len
        dims = [dim for dim in context.job.mesh.dims if dim.name in context.mesh]
        self._sequence = [context.mesh[dim.name] for dim in dims if dim.divides == "sequence"]
        self._weights = [context.mesh[dim.name] for dim in dims if dim.divides == "weights"]

    def __call__(self, result: Tensor, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """
        Args:
            result: ``[b, s, d]``, to which the loss is attached.
            probabilities: of all experts, fp32 ``[b, s, e]``.
            chosen: indices of the chosen experts, ``[b, s, k]``.
        """
        microbatch = current_microbatch()
        if microbatch is None or microbatch.auxiliary is None:
            return result
        experts = probabilities.shape[-1]
        counts = (chosen[..., None] == torch.arange(experts, device=chosen.device)).sum((1, 2)).float()
        ranks = self._seq_len // chosen.shape[1]
        divided = ranks > math.prod(mesh.size() for mesh in self._sequence)  # sequence parallelism
        for mesh in (*self._sequence, *(self._weights if divided else ())):
            dist.all_reduce(counts, group=mesh.get_group())
        share = counts / (self._seq_len * chosen.shape[2])
        loss = self._weight * experts * (probabilities * share[:, None]).sum()
        return add_auxiliary_loss(result, NAME, loss, divided=divided)
