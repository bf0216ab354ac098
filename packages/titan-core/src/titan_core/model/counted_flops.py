"""The size of a model as built: its parameters, and the floating-point operations of its matmuls, counted in a trial, beside
those that its plugin states."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from titan_core.api import CAUSAL_ATTENTION, ModelTrial, Problem
from titan_core.api.observe.events import ModelSize
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.stand_in import first_alike

log = logging.getLogger(__name__)

_REFUSED, _NOTED = 2.0, 1.1
"""Factors between what a plugin states and what a trial counts."""


def check_flops(trial: ModelTrial, model: nn.Module, job: AssembledJob, counted: Mapping[str, float]) -> Iterator[Problem]:
    """Yield a problem if the model's ``flops_per_token`` is another number than those counted; log a smaller difference.

    Mixers of other kinds than causal attention may compute any number, as the cost of chunks depends on their length.

    Args:
        counted: operations of each module of the trial's copy, in its forward pass.
    """
    layout = job.model.layout
    mixers = {call.name: mixer for call in trial.calls if (mixer := layout.mixer(call.name)) is not None}
    attends = bool(mixers) and all(mixer.kind == CAUSAL_ATTENTION for mixer in mixers.values())
    length = job.batch.seq_len if attends else trial.seq
    tokens = trial.tokens.numel()
    least = defaultdict[str, float](float, {name: number / tokens for name, number in counted.items()})
    most = least.copy()
    for call in trial.calls_of(mixers):
        mixer, own = mixers[call.name], counted[call.name] / tokens
        q, _, v = call.arguments[:3] if mixer.kind == CAUSAL_ATTENTION else (None, None, None)
        scores = 0.0 if q is None else 2.0 * q[1] * (q[3] + v[3]) * min(length, mixer.window or length)
        for name in _around(call.name):
            least[name] += scores - own
            most[name] += scores - own if q is not None else 0.0
    units = ["", *(first for path, first in first_alike(model, layout).items() if path != first)]
    # A model that predicts several tokens computes at most itself once for each, and in a trial only the first.
    low, high = (
        3.0 * sum(least[name] for name in units),
        3.0 * sum(most[name] for name in units) * layout.states_per_position,
    )
    stated = job.model.flops_per_token(length)
    factor = max(stated / high if high else 1.0, low / stated if stated else float("inf"))
    if factor <= _NOTED:
        return
    found = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    why = (
        f"flops_per_token({length}) is {stated:.4g}, but the matmuls of a trial are {found} floating-point operations per "
        f"token, forward and backward: a factor of {factor:.3g}"
    )
    if factor > _REFUSED:
        scores = "6 x heads x (key width + value width) x context"
        yield trial.problem(why, f"count 6 per element of each matrix that a token is multiplied by, and {scores}")
    else:
        log.warning("layout of model %r: %s; MFU, plans and estimates depend on it", job.model_name, why)


def _around(name: str) -> Iterator[str]:
    """Yield the names of a module and of those around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def size_of(model: nn.Module, job: AssembledJob) -> ModelSize:
    """Return the size of ``model``, the whole model of ``job``. Warn if its plugin declares another number of parameters,
    which commands that build no model show."""
    definition = job.model
    modules = (model.get_submodule(name) for name in definition.layout.embedding)
    embedding = {id(parameter) for module in modules for parameter in module.parameters()}
    counts = {id(parameter): parameter.numel() for parameter in model.parameters()}  # a tied parameter occurs once
    total = sum(counts.values())
    if total != definition.num_params:
        declared = definition.num_params
        log.warning("model %r has %d parameters, but its definition has num_params = %d", job.model_name, total, declared)
    return ModelSize(total, total - sum(counts[parameter] for parameter in embedding))
