"""A model compared with the library's eager implementation, on the trial's copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from titan_core.api import CausalAttention, ModelTrial, Problem, TrainingContext
from titan_models_hf import mixers, transformers_private as library
from titan_models_hf.experts import compute_by_library, compute_by_rows, is_by_rows


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[Any]) -> Iterator[Problem]:
    """Yield a problem if the library's eager attention, masks and experts give other logits than Titan's."""
    modules: list[Any] = list(trial.module("").modules())
    attentions = [module for module in modules if isinstance(getattr(module, "titan_mixer", None), CausalAttention)]
    experts = [module for module in modules if is_by_rows(module)]
    if (attentions or experts) and not trial.same(*_logits(trial, attentions, experts)):
        why = f"its logits are not those of transformers {library.VERSION} with its eager implementation"
        yield trial.problem(why, "report this with the architecture and its config")


def _logits(trial: ModelTrial, attentions: list[Any], experts: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the logits by Titan's mixers and experts, and by the library's eager implementation."""
    copy = trial.module("")
    shortened = [module.titan_mixer.window for module in attentions]  # the trial's, which the library does not know
    for module in attentions:
        module.titan_mixer.window = module.titan_call.window
    try:
        ours = trial.run(trial.tokens)
        if attentions:
            library.use_attention(copy, library.EAGER)
        for module in experts:
            compute_by_library(module)
        return ours, trial.run(trial.tokens)
    finally:
        if attentions:
            library.use_attention(copy, mixers.NAME)
        for module in experts:
            compute_by_rows(module)
        for module, window in zip(attentions, shortened, strict=True):
            module.titan_mixer.window = window
