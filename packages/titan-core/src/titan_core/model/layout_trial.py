"""Checks of a layout against what its model computes: a forward pass of a small copy, and more if the job divides it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api import CAUSAL_ATTENTION, CausalAttention, JobMesh, Mixer, ModuleCall, Problem, UserError
from titan_core.api.config.sections import DataSection
from titan_core.api.model.packed_attention import WIDEST, too_wide
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.model.cached_decoding import check_decoding
from titan_core.model.counted_flops import check_flops
from titan_core.model.dependences import check_batches, check_draws_and_order
from titan_core.model.streams import check_streams
from titan_core.model.trial import CannotTry, SmallModelTrial
from titan_core.toolkit.simulation import current_simulation

log = logging.getLogger(__name__)


def try_model(model: nn.Module, job: AssembledJob, mesh: JobMesh, device: torch.device) -> bool:
    """Try the whole ``model``, on the meta device, with a few tokens.

    Returns:
        Whether its forward returns the output of the last module, so that the loss may be computed there.

    Raises:
        UserError: the model contradicts its layout, or does not meet the needs of a transform.
    """
    try:
        trial = _trial(model, job, device)
    except CannotTry as error:
        needs = [transform.name for transform in job.transforms if transform.checks.model is not None]
        why = f"a trial of its forward on a few tokens raised {error}"
        if needs:
            fix = "fix the model plugin, or switch these off"
            raise UserError.one(f"model {job.model_name!r}", f"{why}; required by {', '.join(needs)}", fix) from error
        log.warning("layout of model %r: not checked, because %s", job.model_name, why)
        return False
    simulation = current_simulation()
    problems = _problems(model, trial, job, mesh, device) if simulation is None or simulation.checks_model else ()
    if problems:
        raise UserError(*problems)
    return trial.returns_the_head


def _problems(
    model: nn.Module, trial: SmallModelTrial, job: AssembledJob, mesh: JobMesh, device: torch.device
) -> Sequence[Problem]:
    """Return what contradicts the layout, or the needs of a transform."""
    if problems := [*_mistakes(trial), *check_streams(model, trial), *_wide_heads(trial, job)]:
        return problems
    if problems := [*check_draws_and_order(trial, job), *check_flops(trial, model, job, trial.flops)]:
        return problems
    # Not in training mode, where running statistics make a sequence depend on the others.
    with trial.evaluating():
        problems = list(check_batches(trial, job))
    for transform in job.transforms if not problems else ():
        if transform.checks.model is not None:
            context = transform.training_context(job, mesh, device)
            problems += transform.checks.model.call_list(Problem, model, trial, context)
    if not problems:
        with trial.evaluating():
            problems = list(check_decoding(trial))
        if all(mixer.kind == CAUSAL_ATTENTION for mixer in trial.layout.mixers.values()):
            for problem in problems:  # the model may be trained for another use: no mixer of its own keeps a state
                log.warning("%s", problem)
            return []
    return problems


def _trial(model: nn.Module, job: AssembledJob, device: torch.device) -> SmallModelTrial:
    """Try on the CPU; if that fails, with longer sequences, and then on the training device."""
    cpu, layout = torch.device("cpu"), job.model.layout
    attempts: list[tuple[torch.device, int | None]] = [(cpu, None), (cpu, min(256, job.batch.seq_len))]
    if device.type != "cpu":
        attempts += [(device, length) for _, length in attempts]
    first: CannotTry | None = None
    for trial_device, length in attempts:
        try:
            return SmallModelTrial(model, layout, job.model_name, trial_device, length, job.data.extras)
        except CannotTry as error:
            first = first or error
    assert first is not None
    raise first


def _mistakes(trial: SmallModelTrial) -> Iterator[Problem]:
    """Yield what contradicts the layout even without any division."""
    layout, batch, seq = trial.layout, *trial.tokens.shape
    logits = (batch, seq, layout.vocab_size)
    if not isinstance(trial.logits, Tensor) or tuple(trial.logits.shape) != logits:
        found = list(trial.logits.shape) if isinstance(trial.logits, Tensor) else type(trial.logits).__name__
        why = f"forward must return logits [batch, seq, vocab_size] = {list(logits)}, but returns {found}"
        yield trial.problem(why, "fix vocab_size, or the model's forward")
        return
    called = {call.name for call in trial.calls}
    for name in trial.units():
        if name not in called:
            field = "blocks" if name.startswith(f"{layout.blocks}.") else "embedding or head"
            why = f"{field} names {name!r}, but the model's forward never calls it"
            yield trial.problem(
                why, "call the module itself rather than use its weight, or name the modules that are called"
            )
    blocks = [f"{layout.blocks}.{index}" for index in range(layout.num_blocks)]
    hidden = (batch, seq, layout.dim)
    for call in trial.calls_of(blocks):
        if call.output != hidden:
            shown = f"[batch, seq, dim] = {list(hidden)}, but returns {_text(call.output)}"
            why = f"{call.name!r} must return hidden states {shown}"
            yield trial.problem(why, "fix dim, or the module's forward")
            break
    yield from _mixers(trial)
    if layout.max_seq_len > trial.seq:
        last = trial.positions.clone()
        last[:, -1] = layout.max_seq_len - 1
        try:
            trial.run(trial.tokens, last)
        except Exception as error:  # noqa: BLE001 - the model's code may raise anything
            why = f"max_seq_len is {layout.max_seq_len}, but position {layout.max_seq_len - 1} raises {type(error).__name__}"
            yield trial.problem(
                f"{why}: {' '.join(str(error).split())[:120]}", "fix max_seq_len, or enlarge the model's position table"
            )


def _mixers(trial: SmallModelTrial) -> Iterator[Problem]:
    """Yield mixers that are called with the wrong tensors, or return the wrong ones."""
    layout, batch, seq = trial.layout, *trial.tokens.shape
    for call in trial.calls:
        mixer = layout.mixer(call.name)
        if mixer is None:
            continue
        if mixer.kind != CAUSAL_ATTENTION:
            yield from _own_mixer(trial, call, mixer)
            continue
        shapes = [shape for shape in call.arguments[:3] if isinstance(shape, tuple) and len(shape) == 4]
        count = 4 if layout.masks_documents else 3
        fix = "call it with (q, k, v), each [batch, heads, seq, head_dim], by position"
        strange = any(shape[0] != batch or shape[2] != seq for shape in shapes)
        if len(shapes) != 3 or len(call.arguments) > count or strange:
            found = ", ".join(map(_text, call.arguments)) or "keyword arguments only"
            why = f"mixers names {call.name!r}, which is called with {found}"
            yield trial.problem(why, fix)
            return
        q, k, v = shapes
        if (q[1], k[1], v[1]) != (mixer.heads, mixer.key_heads, mixer.key_heads):
            why = (
                f"heads is {mixer.heads} and kv_heads {mixer.key_heads}, but {call.name!r} is called with {q[1]} and {k[1]}"
            )
            yield trial.problem(why, "fix heads and kv_heads of its mixer")
            return
        if call.output != (*q[:3], v[3]):
            yield trial.problem(f"mixers names {call.name!r}, which returns {_text(call.output)} for q {list(q)}", fix)
            return
        module = trial.module(call.name)
        if isinstance(module, CausalAttention):
            computed = {name: value for name, value in module.options.items() if value != mixer.options[name]}
            if computed:
                declared = {name: mixer.options[name] for name in computed}
                why = f"mixers says {declared} of {call.name!r}, which computes with {computed}"
                yield trial.problem(why, "give both the same options")
                return


def _wide_heads(trial: SmallModelTrial, job: AssembledJob) -> Iterator[Problem]:
    """Yield a problem if the job uses variable-length attention, and a head is too wide for it."""
    if job.config.section(DataSection).document_attention != "varlen":
        return
    mixers = ((call, trial.layout.mixer(call.name)) for call in trial.calls)
    packed = [
        call
        for call, mixer in mixers
        if mixer is not None and mixer.kind == CAUSAL_ATTENTION and mixer.softcap is None and not mixer.sinks
    ]
    widest = max((shape[3] for call in packed for shape in call.arguments[:3] if isinstance(shape, tuple)), default=0)
    if widest > WIDEST:
        yield job.config.problem("data.document_attention", too_wide(widest), 'set it to "flex"')


def _own_mixer(trial: SmallModelTrial, call: ModuleCall, mixer: Mixer) -> Iterator[Problem]:
    """Yield a mixer, of a kind that only its model knows, whose positions are in another dimension than declared."""
    batch, dim = len(trial.tokens), mixer.sequence_dim
    shapes = [shape for shape in (*call.arguments, call.output) if isinstance(shape, tuple)]
    for shape in (shapes[0] if shapes else None, call.output):
        if not (isinstance(shape, tuple) and 0 < dim < len(shape) and (shape[0], shape[dim]) == (batch, trial.seq)):
            why = (
                f"mixers names {call.name!r}; its tensors must have positions in dimension {dim}, but one is {_text(shape)}"
            )
            fix = "fix sequence_dim, pass tensors as positional arguments, and return one tensor"
            yield trial.problem(why, fix)
            return


def _text(shape: Any) -> str:
    if isinstance(shape, tuple):
        return str(list(shape))
    return "None" if shape is None else f"a {shape.__name__}"
