"""The recurrence if each rank has some chunks of every sequence: each chunk alone, then the effect of earlier chunks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_core.api import SequenceShare
from titan_model_hybrid.scan import begins, scan


def divided(module: nn.Module, share: SequenceShare) -> Callable[..., Tensor]:
    """Return a forward that replaces that of ``LinearRecurrence``. Ranks exchange two numbers for each chunk and feature."""

    def forward(decay: Tensor, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            decay = decay.masked_fill(share.take(begins(documents), dim=1)[..., None], 0.0)
        count = len(share.own)
        chunks = [scan(*chunk) for chunk in zip(decay.chunk(count, 1), inputs.chunk(count, 1), strict=True)]
        ends = torch.stack([torch.cat((states[:, -1], decays[:, -1]), dim=-1) for states, decays in chunks], dim=1)
        states, decays = share.gather(ends, dim=1).chunk(2, dim=-1)
        after, _ = scan(decays, states)  # the state after each chunk of the sequence
        before = torch.cat((torch.zeros_like(after[:, :1]), after[:, :-1]), dim=1)
        pieces = zip(share.own, chunks, strict=True)
        return torch.cat([states + decays * before[:, chunk, None] for chunk, (states, decays) in pieces], dim=1)

    return forward
