"""Checks of a layout against its model, when the model is built. Each check yields what is wrong."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator

from torch import nn

from titan_core.api import Column, Experts, ModelLayout, Problem, Row, Shard, UserError, matches
from titan_core.toolkit.errors import close_names


def check_layout(model: nn.Module, layout: ModelLayout, name: str) -> None:
    """Check ``layout`` against the whole ``model``, before any transform.

    Raises:
        UserError: a name or pattern matches nothing, a parameter or buffer has no initial value, sizes differ, or a
            parameter does not belong to exactly one of embedding, blocks and head.
    """
    where, fix = f"layout of model {name!r}", "fix the model plugin"
    mistakes = [mistake for check in _CHECKS for mistake in check(model, layout)]
    problems = [Problem(where, why, fix) for why in mistakes]
    if not problems:  # names that do not exist own nothing
        problems = [Problem(where, *mistake) for mistake in _ownership(model, layout)]
    if problems:
        raise UserError(*problems)


def _ends(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """The modules before and after the blocks exist."""
    modules = {path for path, _ in model.named_modules()}
    for field in ("embedding", "head"):
        names = getattr(layout, field)
        yield from (f"{field} names {path!r}, which is not a module" for path in names if path not in modules)
        if not names:
            yield f"{field} is empty"


def _blocks(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """The blocks are a list of the stated length, and their costs are numbers."""
    modules = dict(model.named_modules())
    if layout.blocks not in modules:
        yield f"blocks names {layout.blocks!r}, which is not a module"
    else:
        blocks = modules[layout.blocks]
        names = [name for name, _ in blocks.named_children()]
        if not isinstance(blocks, nn.ModuleList | nn.ModuleDict):
            yield f"blocks names {layout.blocks!r}, which is a {type(blocks).__name__}, not a ModuleList or ModuleDict"
        elif len(names) != layout.num_blocks:
            yield f"num_blocks is {layout.num_blocks}, but {layout.blocks!r} has {len(names)}"
        elif names != [str(index) for index in range(layout.num_blocks)]:
            yield f"the blocks in {layout.blocks!r} are named {names[0]!r} to {names[-1]!r}, not '0' to '{len(names) - 1}'"
    if layout.block_costs and len(layout.block_costs) != layout.num_blocks:
        yield f"block_costs has {len(layout.block_costs)} numbers, but num_blocks is {layout.num_blocks}"
    if not all(0.0 < cost < math.inf for cost in layout.block_costs):
        yield f"block_costs must be positive and finite, but are {list(layout.block_costs)}"


def _patterns(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Each pattern matches something: one that matches nothing is misspelt."""
    modules = [path for path, _ in model.named_modules()]
    parameters = [path for path, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [path for path, _ in model.named_buffers()]
    for kind, paths, fields in (
        ("module", modules, ("regions", "sums", "mixers", "routers")),
        ("parameter", parameters, ("rules", "parameters", "exact")),
        ("buffer", buffers, ("buffers",)),
    ):
        for field in fields:
            for pattern in getattr(layout, field):
                if not any(matches(path, [pattern]) for path in paths):
                    close = close_names(pattern, dict.fromkeys(map(_pattern, paths)))
                    hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
                    yield f"{field} pattern {pattern!r} matches no {kind}{hint}"
    if layout.masks_documents and "documents" not in inspect.signature(model.forward).parameters:
        yield "masks_documents is true, but the model's forward has no parameter 'documents'"


def _values(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Each parameter and buffer has a value to start from."""
    missing = [path for path, _ in model.named_parameters() if layout.initial_value(path) is None]
    yield from (f"parameter {path!r} has no initial value" for path in dict.fromkeys(map(_pattern, missing)))
    missing = [path for path, _ in model.named_buffers() if not matches(path, layout.buffers)]
    yield from (f"buffer {path!r} has no function that computes it" for path in dict.fromkeys(map(_pattern, missing)))


def _pattern(path: str) -> str:
    """Return the pattern of ``path`` in all blocks: ``layers.*.norm.weight`` for ``layers.3.norm.weight``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _tied(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """The layout names all parameters that are one, and no others."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, source in layout.tied.items():
        if path not in parameters or source not in parameters:
            yield f"tied names {path!r} and {source!r}, but one of them is not a parameter"
        elif parameters[path] is not parameters[source]:
            yield f"tied names {path!r} and {source!r}, but they are not one parameter in the model"
    aliases = set(parameters) - {path for path, _ in model.named_parameters()}
    for path in sorted(aliases - set(layout.tied)):
        yield f"parameter {path!r} is shared with another one that tied does not name"


def _rules(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Each rule can divide its parameters."""
    for path, parameter in model.named_parameters(remove_duplicate=False):
        rule = layout.rule(path)
        name = path.rpartition(".")[0]
        if isinstance(rule, Column | Row):
            module = model.get_submodule(name)
            if not isinstance(module, nn.Linear):
                shown = (
                    f"{type(rule).__name__}() for {path!r}, but its module is a {type(module).__name__}, not an nn.Linear"
                )
                yield f"rules contain {shown}: use Shard(dim) for other parameters"
            elif layout.rule(f"{name}.weight") != rule or (module.bias is not None and layout.rule(f"{name}.bias") != rule):
                yield f"rules contain {rule} for {path!r}, but weight and bias of a layer must have the same rule"
        if isinstance(rule, Shard) and rule.norm:
            others = [
                other
                for leaf, _ in model.get_submodule(name).named_parameters(recurse=False)
                if (other := layout.rule(f"{name}.{leaf}")) != rule
            ]
            if parameter.dim() != 1 or others:
                yield f"rules contain {rule} for {path!r}: all parameters of a norm have one dimension, and the same rule"
        dims = [rule.dim] if isinstance(rule, Shard | Experts) else []
        if isinstance(rule, Experts) and isinstance(rule.within, Shard):
            dims.append(rule.within.dim)
        for dim in dims:
            if not -parameter.dim() <= dim < parameter.dim():
                yield f"rules contain {rule} for {path!r}, which has {parameter.dim()} dimension(s)"
        if len({dim % max(1, parameter.dim()) for dim in dims}) < len(dims):
            yield f"rules contain {rule} for {path!r}, which divides one dimension twice"


def _exact(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Modules compute either in fp32 or not: data parallelism gathers all parameters of a module in one type."""
    for path, module in model.named_modules():
        own = [name for name, _ in module.named_parameters(path, recurse=False) if matches(name, layout.exact)]
        others = [name for name, _ in module.named_parameters(path) if not matches(name, layout.exact)]
        if own and others:
            yield f"exact contains {own[0]!r} but not {others[0]!r} of the same module: move one into a module of its own"
    for name in (name for pair in layout.tied.items() for name in pair):
        if matches(name, layout.exact):
            yield f"exact contains {name!r}, which is tied to another parameter"


def _routers(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Routers choose from as many experts as the parameters of a block hold."""
    held: dict[str, set[int]] = {}
    for path, parameter in model.named_parameters():
        rule = layout.rule(path)
        if isinstance(rule, Experts) and -parameter.dim() <= rule.dim < parameter.dim():
            held.setdefault(_block_of(path, layout), set()).add(parameter.shape[rule.dim])
    for path, _ in model.named_modules():
        router, experts = layout.router(path), held.get(_block_of(path, layout))
        if router is not None and experts is not None and router.experts not in experts:
            yield f"routers let {path!r} choose from {router.experts} experts, but its block has {min(experts)}"


def _block_of(path: str, layout: ModelLayout) -> str:
    return path.removeprefix(f"{layout.blocks}.").partition(".")[0] if path.startswith(f"{layout.blocks}.") else ""


_CHECKS = (_ends, _blocks, _patterns, _rules, _values, _tied, _exact, _routers)


def _ownership(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, str]]:
    """Yield (why, fix) for each parameter that does not belong to exactly one module of embedding, blocks and head. Hidden
    states pass through these modules; pipelines distribute them, and FSDP gathers them, as units.
    """
    fields = {name: field for field in ("embedding", "head") for name in getattr(layout, field)}
    blocks = [f"{layout.blocks}.{index}" for index in range(layout.num_blocks)]
    fields |= dict.fromkeys(blocks, "blocks")
    named = [*layout.embedding, *blocks, *layout.head]
    for name in sorted({name for name in named if named.count(name) > 1}):
        yield f"module {name!r} is named more than once in embedding, blocks and head", "name it once"
    for name, field in fields.items():
        for outer, other in fields.items():
            if name.startswith(f"{outer}."):
                yield f"{field} names {name!r}, which is part of {outer!r} in {other}", "name only one of the two"
    persistent = set(model.state_dict(keep_vars=True))
    tensors = {path: "parameter" for path, _ in model.named_parameters()}
    tensors |= {path: "persistent buffer" for path, _ in model.named_buffers() if path in persistent}
    for path, kind in tensors.items():
        if not any(path.startswith(f"{unit}.") for unit in fields):
            owner = path.rpartition(".")[0]
            fix = f"add its module {owner!r} to one of them" if owner else "move it into a module that one of them names"
            yield f"{kind} {path!r} belongs to none of embedding, blocks and head", fix
