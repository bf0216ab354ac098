"""What a checkpoint says about the run that saved it."""

from __future__ import annotations

from typing import Any

import torch

from titan_ckpt.resume.comparing import resolved
from titan_ckpt.resume.config_changes import decisive_keys
from titan_core.api import ChatTokenizer, TextTokenizer, World
from titan_core.toolkit.jobs import AssembledJob


def about_run(job: AssembledJob, world: World) -> dict[str, Any]:
    """Return the entries of :attr:`titan_ckpt.format.stored.Manifest.about` that are the same at each step."""
    return {
        "model": job.name,
        "model_name": job.model_name,
        **resolved(job),
        "decisive": decisive_keys(job.config),
        "tokenizer": token_ids(job.text_tokenizer),
        "mesh": {name: degree for name, degree in world.plan.degrees.items() if degree > 1},
        "world_size": world.size,
        "diverging_replicas": world.plan.diverging_replicas,
        "torch": torch.__version__,
        **job.identity(),
    }


def token_ids(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer`` puts at the ``begin`` and ``end`` of a document, both empty if that is unclear, and
    at the end of the assistant's turn in a chat (``turn_end``)."""
    turn_end = [int(token) for token in tokenizer.turn_end_ids] if isinstance(tokenizer, ChatTokenizer) else []
    return {"begin": tokenizer.begin_ids, "end": tokenizer.end_ids, "turn_end": turn_end}
