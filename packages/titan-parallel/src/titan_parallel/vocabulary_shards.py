"""Token embeddings whose rows, the vocabulary, are sharded over ranks (Shoeybi et al., arXiv 1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from titan_core.api import UserError
from titan_parallel.local_parameters import divide_parameters
from titan_parallel.region_collectives import Positions


def divide_embedding(module: nn.Embedding, name: str, mesh: DeviceMesh, positions: Positions) -> None:
    """Shard the rows of ``module``. Each rank looks up the tokens in its rows; the sum over ranks is held by ``positions``.

    Raises:
        UserError: the module has an option that depends on which tokens a batch has.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            why = f"has {option}, which tensor parallelism cannot compute from a rank's rows"
            raise UserError.one(f"module {name!r} of the model", why, f"build it without {option}")
    rows = -(-module.num_embeddings // mesh.size())  # the last ranks may hold fewer, or none
    first = min(mesh.get_local_rank() * rows, module.num_embeddings)
    end = min(first + rows, module.num_embeddings)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - first if first <= module.padding_idx < end else None
    divide_parameters(module, mesh, {"weight": Shard(0)})
    compute: Any = module.forward

    def forward(tokens: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        mine = (tokens >= first) & (tokens < end)
        if first < end:
            found = compute(torch.where(mine, tokens - first, 0), *arguments, **keywords)
        else:  # no rows: zeros that depend on the weight, so that it has a gradient on every rank
            found = module.weight.new_zeros(*tokens.shape, module.weight.shape[1]) + module.weight.sum()
        return positions.leave(found.masked_fill(~mine[..., None], 0.0))

    replaced: Any = module
    replaced.forward = forward
