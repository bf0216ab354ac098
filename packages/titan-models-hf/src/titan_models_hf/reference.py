"""A model compared with the library's eager implementation, and its positions with later ones, on the trial's copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from titan_core.api import CausalAttention, ModelTrial, Problem, TrainingContext
from titan_models_hf import mixers, transformers_private as library


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[Any]) -> Iterator[Problem]:
    """Yield a problem if the library's eager attention and masks give other logits than Titan's mixers, or if a position
    depends on later ones."""
    tokens = trial.tokens.clone()
    tokens[:, -1] = (tokens[:, -1] + 1) % trial.layout.vocab_size
    if not trial.same(trial.run(tokens)[:, :-1], trial.run(trial.tokens)[:, :-1]):
        why = "positions depend on later ones, which a model that predicts the next token must not see"
        yield trial.problem(why, "choose a causal decoder (an encoder may have a key is_decoder)")
    attentions: list[Any] = [
        module for module in trial.module("").modules() if isinstance(getattr(module, "titan_mixer", None), CausalAttention)
    ]
    if attentions and not trial.same(*_logits(trial, attentions)):
        why = f"its logits are not those of transformers {library.VERSION} with its eager attention"
        yield trial.problem(why, "report this with the architecture and its config")


def _logits(trial: ModelTrial, attentions: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the logits by Titan's mixers, and by the library's eager attention."""
    copy = trial.module("")
    shortened = [module.titan_mixer.window for module in attentions]  # the trial's, which the library does not know
    for module in attentions:
        module.titan_mixer.window = module.titan_call.window
    try:
        ours = trial.run(trial.tokens)
        library.use_attention(copy, library.EAGER)
        return ours, trial.run(trial.tokens)
    finally:
        library.use_attention(copy, mixers.NAME)
        for module, window in zip(attentions, shortened, strict=True):
            module.titan_mixer.window = window
