"""Fast checks of a model, in one process: what its layout and definition say, against what its code computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from titan_core.api import Decoding, Experts, ModelPart, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.build import build_whole
from titan_core.model.counted_flops import check_flops
from titan_core.model.materialise import materialise
from titan_core.model.next_token import NextToken
from titan_core.model.trial import CannotTry, SmallModelTrial
from titan_testing.checks import model_error
from titan_testing.checks.formats import check_formats, relative_difference

_CPU = torch.device("cpu")
_TOKENS = 12
_WITHIN = 2e-5
"""Largest difference of logits that another order of sums explains, relative to the largest logit. Weights are random."""


def check_layout(job: AssembledJob) -> str:
    """Check that the model is built on the meta device, and that its layout covers all of it."""
    model = build_whole(job)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            why = f"builds {name!r} on {tensor.device} although the meta device is the default"
            raise model_error(
                job, why, "make tensors without a device; values come from the layout's parameters and buffers"
            )
    return f"{len(list(model.parameters()))} parameters in {job.model.layout.num_blocks} blocks, all covered"


def check_sizes(job: AssembledJob) -> str:
    """Check the number of parameters and of floating-point operations that the definition states."""
    model = build_whole(job)
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != job.model.num_params:
        why = f"has {counted:,} parameters, but its definition has num_params = {job.model.num_params:,}"
        raise model_error(job, why, "correct num_params; a tied parameter counts once")
    trial = _trial(model, job)
    if problems := list(check_flops(trial, model, job, trial.flops)):
        raise UserError(*problems)
    return f"{counted:,} parameters, {job.model.flops_per_token(job.batch.seq_len):.4g} FLOPs per token of training"


def check_forward(job: AssembledJob) -> str:
    """Check that a small copy of the model computes logits; a job only warns if it does not, and leaves its checks out."""
    trial = _trial(build_whole(job), job)
    return f"logits {list(trial.logits.shape)}"


def check_causality(job: AssembledJob) -> str:
    """Check that a later token changes no earlier logit, in evaluation too."""
    model, tokens = _model(job), _tokens(job)
    later = tokens.clone()
    later[:, _TOKENS // 2 :] = (later[:, _TOKENS // 2 :] + 1) % job.model.layout.vocab_size
    _require_same(job, model(tokens)[:, : _TOKENS // 2], model(later)[:, : _TOKENS // 2], "depend on later tokens")
    return f"{_TOKENS // 2} positions unchanged"


def check_documents(job: AssembledJob) -> str:
    """Check that packed documents have the logits that each has alone."""
    if not job.model.layout.masks_documents:
        return "not masked, so that a job with data.document_mask is refused"
    model, tokens, cut = _model(job), _tokens(job), _TOKENS // 2
    place = torch.arange(_TOKENS).expand(len(tokens), -1)
    documents, positions = (place >= cut).long(), place % cut
    packed = model(tokens, positions, documents)
    alone = torch.cat([model(part, positions[:, :cut]) for part in tokens.split(cut, dim=1)], dim=1)
    _require_same(job, packed, alone, "of packed documents are not those of each document alone")
    return "2 packed documents as alone"


def check_decoding(job: AssembledJob) -> str:
    """Check that logits token by token, with what :class:`~titan_core.api.Decoding` keeps, are those of the whole text."""
    model, tokens = _model(job), _tokens(job)
    decoding, found = Decoding(len(tokens), _TOKENS), []
    for at in (slice(0, 5), *(slice(place, place + 1) for place in range(5, _TOKENS))):
        positions = torch.arange(_TOKENS).expand(len(tokens), -1)[:, at]
        with decoding.computing(positions, at.stop):
            found.append(model(tokens[:, at], positions))
    mixers = {path for path, _ in model.named_modules() if job.model.layout.mixer(path) is not None}
    kept = {path for path, module in model.named_modules() if module in decoding.mixers}
    if mixers - kept:
        return f"without a cache, because {', '.join(sorted(mixers - kept))} keeps no state"
    _require_same(job, torch.cat(found, dim=1), model(tokens), "of generation differ from those of the whole text")
    return f"{_TOKENS - 5} tokens after a prompt of 5"


CHECKS: Mapping[str, Callable[[AssembledJob], str]] = {
    "layout": check_layout,
    "forward": check_forward,
    "sizes": check_sizes,
    "causality": check_causality,
    "documents": check_documents,
    "decoding": check_decoding,
    "weight formats": check_formats,
}


def has_experts(job: AssembledJob) -> bool:
    """Whether expert parallelism can divide the model."""
    return any(isinstance(rule, Experts) for rule in job.model.layout.rules.values())


def _trial(model: nn.Module, job: AssembledJob) -> SmallModelTrial:
    try:
        return SmallModelTrial(model, job.model.layout, job.model_name, _CPU)
    except CannotTry as error:
        raise model_error(job, f"cannot compute a few tokens: {error}", "fix the model's forward") from error


def _model(job: AssembledJob) -> nn.Module:
    """Return the model with its initial weights, in evaluation mode, without gradients."""
    part = ModelPart(build_whole(job), job.model.layout, NextToken())
    materialise(part, _CPU, seed=0)
    return part.module.eval().requires_grad_(False)


def _tokens(job: AssembledJob) -> Tensor:
    numbers = torch.arange(2 * _TOKENS) * 7 + 1
    return (numbers % job.model.layout.vocab_size).view(2, _TOKENS)


def _require_same(job: AssembledJob, found: Tensor, expected: Tensor, why: str) -> None:
    if not (difference := relative_difference(found, expected)) <= _WITHIN:
        raise model_error(job, f"logits {why}: by {difference:.1e} of the largest", "fix the model plugin")
