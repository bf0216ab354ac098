"""Checks of the routers of a job's model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_core.api import JobContext, ModelLayout, ModelTrial, Problem, Router, TrainingContext
from titan_experts.config import ExpertsSection

if TYPE_CHECKING:
    from torch import Tensor, nn

BALANCE, Z_LOSS, FORCED = "experts.balance", "experts.z_loss_weight", "experts.force_balanced"
OTHER_BALANCE = 'set it to "sequence" or "global", or use a model whose routers have one (Router.bias)'


def check(context: JobContext[ExpertsSection]) -> Iterator[Problem]:
    """Require routers, all with the same number of experts."""
    layout = context.job.model.layout
    if not layout.routers:
        why = f"model {context.job.model_name!r} has no experts to balance: its layout names no routers"
        if context.section.balance != "none":
            yield context.config.problem(BALANCE, why, 'set it to "none"')
        elif context.section.z_loss_weight:
            yield context.config.problem(Z_LOSS, why, "set it to 0.0")
        else:
            yield context.config.problem(FORCED, why, "set it to false")
    elif len({router.experts for router in layout.routers.values()}) > 1:
        why = f"the routers of model {context.job.model_name!r} choose from different numbers of experts"
        yield context.config.problem(BALANCE, why, "use a model whose blocks have equally many")
    elif context.section.balance == "bias" and any(router.bias is None for router in layout.routers.values()):
        why = f"model {context.job.model_name!r} has no bias of the choice of experts that training may change and that its"
        yield context.config.problem(BALANCE, f"{why} weight files hold", OTHER_BALANCE)


def bias_of(router: nn.Module, name: str | None) -> Tensor | None:
    """Return the buffer ``name`` of a router (:attr:`titan_core.api.Router.bias`); ``None`` if it has none."""
    return dict(router.named_buffers()).get(name or "")


def num_experts(layout: ModelLayout) -> int:
    """Return the number of experts of each block that has some."""
    return next(iter(layout.routers.values())).experts


def block_of(path: str, layout: ModelLayout) -> int:
    """Return the number of the block that contains the module ``path``; -1 if none does."""
    prefix = f"{layout.blocks}."
    name = path.removeprefix(prefix).partition(".")[0] if path.startswith(prefix) else ""
    return int(name) if name.isdecimal() else -1


def check_model(model: nn.Module, trial: ModelTrial, context: TrainingContext[ExpertsSection]) -> Iterator[Problem]:
    """Require that each block has at most one router, which returns what it must, with a bias if it is changed, and with
    logits if they have a loss."""
    routers = {path: router for path, _ in model.named_modules() if (router := trial.layout.router(path)) is not None}
    blocks = [block_of(path, trial.layout) for path in routers]
    if -1 in blocks or len(set(blocks)) < len(blocks):
        yield trial.problem("not each of the routers is the only one of a block", "balance no experts of this model")
        return
    returned: dict[str, list[tuple[int, ...]]] = {}
    # Blocks that are built alike are tried once.
    called = {call.name for call in trial.calls_of(routers)}
    trial.run(trial.tokens, trial.positions, around={path: partial(_noted, path, returned) for path in called})
    for path, shapes in returned.items():
        if [shape[1:] for shape in shapes] != [(size,) for size in _widths(routers[path])]:
            why = f"router {path!r} returns tensors of the shapes {shapes}"
            fix = "return (weights [tokens, per_token], chosen [tokens, per_token], scores of all experts [tokens, experts])"
            yield trial.problem(why, fix)
            return
    if context.section.z_loss_weight and (wrong := _without_logits(trial, {path: routers[path] for path in called})):
        fix = "pass its logits [tokens, experts] through a child module `logits` (nn.Identity()), or set it to 0.0"
        yield context.config.problem(Z_LOSS, wrong, fix)
        return
    for path, router in routers.items():
        module = model.get_submodule(path)
        if context.section.balance == "bias" and bias_of(module, router.bias) is None:
            why = f"the choice of router {path!r} has no bias: it has no buffer {router.bias!r}"
            yield context.config.problem(BALANCE, why, OTHER_BALANCE)
            return
        if context.section.force_balanced and "choice" not in dict(module.named_children()):
            yield context.config.problem(FORCED, f"router {path!r} has no module `choice`", "set it to false")
            return


def _without_logits(trial: ModelTrial, routers: dict[str, Router]) -> str | None:
    """Describe the first router whose result does not follow from logits that its module ``logits`` returns."""
    for path, router in routers.items():
        name = f"{path}.logits"
        shapes = [call.output for call in trial.calls_of([name])]
        if not shapes:
            return f"router {path!r} has no module `logits` that it calls"
        if len(shapes) > 1 or len(shapes[0]) != 2 or shapes[0][1] != router.experts:
            return f"router {path!r} calls its module `logits` with the shapes {shapes}"
        lost = trial.run(trial.tokens, trial.positions, around={name: lambda forward, logits: forward(logits) * math.nan})
        if trial.same(lost):
            return f"router {path!r} does not use what its module `logits` returns"
    return None


def _noted(path: str, returned: dict[str, list[tuple[int, ...]]], forward: Callable[..., Any], *arguments: Any) -> Any:
    """Call a router and note the shapes of what it returns."""
    result = forward(*arguments)
    tensors = result if isinstance(result, tuple) else (result,)
    returned[path] = [tuple(getattr(tensor, "shape", ())) for tensor in tensors]
    return result


def _widths(router: Router) -> tuple[int, int, int]:
    return router.per_token, router.per_token, router.experts
