"""The loss: cross entropy, summed. The trainer divides by the target tokens of the global batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from titan_core.api.batch import IGNORE


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all targets that are not :data:`~titan_core.api.batch.IGNORE`.

    Args:
        logits: ``[batch, seq, vocab]``, computed with in fp32 whatever their type.
        targets: ``[batch, seq]``.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORE)
