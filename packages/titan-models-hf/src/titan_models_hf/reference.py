"""The comparison of a model with the library's eager implementation, on the trial's copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from titan_core.api import CausalAttention, ModelTrial, Problem, TrainingContext
from titan_models_hf import mixers, transformers_private as library


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[Any]) -> Iterator[Problem]:
    """Yield a problem if the library's eager attention and masks give other logits than Titan's mixers."""
    copy = trial.module("")
    attentions: list[Any] = [
        module for module in copy.modules() if isinstance(getattr(module, "titan_mixer", None), CausalAttention)
    ]
    shortened = [module.titan_mixer.window for module in attentions]  # the trial's, which the library does not know
    for module in attentions:
        module.titan_mixer.window = module.titan_call.window
    try:
        ours = trial.run(trial.tokens)
        library.use_attention(copy, library.EAGER)
        equal = trial.same(trial.run(trial.tokens), ours)
    finally:
        library.use_attention(copy, mixers.NAME)
        for module, window in zip(attentions, shortened, strict=True):
            module.titan_mixer.window = window
    if not equal:
        why = f"its logits are not those of transformers {library.VERSION} with its eager attention"
        yield trial.problem(why, "report this with the architecture and its config")
