"""Parameters that are not trained: ``training.freeze``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import Config, ModelPart, Problem, UserError, matches
from titan_core.api.config.sections import TrainingSection
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.stages import in_stage

log = logging.getLogger(__name__)

KEY = "training.freeze"


def freeze(model: nn.Module, job: AssembledJob) -> None:
    """Freeze the parameters of ``model``, which is whole, that the job's patterns match. A shared parameter is frozen under
    any of its names; those that transforms add are not.

    Raises:
        UserError: a pattern of the job, or of another stage of its run, matches no parameter, or all parameters are frozen.
    """
    for stage in job.stages:
        if problems := list(_problems(model, stage.config, job)):
            raise in_stage(UserError(*problems), stage.name)
    if problems := list(_problems(model, job.config, job)):
        raise UserError(*problems)
    frozen = {id(one): one for one in _matched(model, job.config.section(TrainingSection).freeze)}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if frozen:
        elements, of_all = (sum(one.numel() for one in some) for some in (frozen.values(), model.parameters()))
        log.info("%s: %s of %s parameters keep their values", KEY, f"{elements:,}", f"{of_all:,}")


def require_trained(model: nn.Module) -> None:
    """
    Raises:
        UserError: no parameter of ``model``, which is whole, requires gradients.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError.one("model", "has no parameter to train", "fix the model plugin")


def let_gradients_begin(part: ModelPart) -> None:
    """Make the output of a frozen embedding require gradients, if modules of ``part`` count statistics: they count in the
    backward pass, which would not reach those before the first trained parameter."""
    if not part.statistics:
        return
    for module in part.present(part.layout.embedding).values():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            module.register_forward_hook(_require_grad)


def _require_grad(module: nn.Module, arguments: Any, output: Any) -> Any:
    if isinstance(output, Tensor) and output.is_floating_point() and torch.is_grad_enabled() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


def _problems(model: nn.Module, config: Config, job: AssembledJob) -> Iterator[Problem]:
    patterns = config.section(TrainingSection).freeze
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            fix = f"match parameters such as {names[0]} or {names[-1]}"
            yield Problem(config.where(KEY, pattern), "the pattern matches no parameter", fix)
    frozen = {id(parameter) for parameter in _matched(model, patterns)}
    trained = [one for one in model.parameters() if one.requires_grad and id(one) not in frozen]
    if frozen and not trained and not job.added:
        fix = "match only the parameters that should keep their values"
        yield Problem(config.where(KEY, patterns), "freezes all parameters, and none is left to train", fix)


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if matches(name, patterns)]
