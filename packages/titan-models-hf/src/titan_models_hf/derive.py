"""Derives the facts of a model from the library: its module tree on the meta device, its plans, and one traced call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from titan_core.api import UserError, matches
from titan_models_hf import transformers_private as library
from titan_models_hf.buffers import uncomputed
from titan_models_hf.config import HFArgs
from titan_models_hf.facts import Facts
from titan_models_hf.initial import JOINED, initial_values
from titan_models_hf.library import plain_model, refusal
from titan_models_hf.rearranged import rearranged_model
from titan_models_hf.recurrent.convolution import CausalConvolution
from titan_models_hf.recurrent.gated_delta_net import GatedDeltaNet
from titan_models_hf.recurrent.mamba import Mamba
from titan_models_hf.routers import routers_of
from titan_models_hf.rules import rules_of
from titan_models_hf.trace import Trace, trace


def derive(args: HFArgs) -> Facts:
    """Return the facts of the model that ``args`` describe.

    Raises:
        UserError: the library does not know the model, or Titan does not understand it.
    """
    with torch.device("cpu"):  # wherever the caller builds
        return _derived(args)


def _derived(args: HFArgs) -> Facts:
    model, rows = rearranged_model(args)
    called = trace(args)
    of_library = initial_values(args, plain_model(args))
    sources = {name: rows[name].parameter if name in rows else name for name, _ in model.named_parameters()}
    if shared := [name for name in sources.values() if name not in of_library]:
        why = f"{shared[0]!r} is a parameter of several blocks, of which Titan replaces the modules, and each needs its own"
        raise refusal(args, why)
    values = {name: of_library[source] for name, source in sources.items()}
    values |= {name: ("loaded", (JOINED,)) for name in rows if values[name][0] == "computed"}
    if (missing := uncomputed(args)) is not None:
        raise refusal(args, f"the library's _init_weights does not compute the buffer {missing!r}")
    blocks = _blocks(args, model)
    embedding, head = _ends(args, model, called, blocks)
    count = len(model.get_submodule(blocks))
    _require_once(args, called, [*embedding, *(f"{blocks}.{index}" for index in range(count)), *head])
    rules, regions = rules_of(model, args.architecture, called)
    # A norm after each expert is a module of the library's within that of the experts, and would not be divided with them.
    experts = tuple(name for name in called.experts if not model.get_submodule(name).has_post_expert_norm)
    rules |= {f"{name}.{leaf}": "experts" for name in experts for leaf, _ in model.get_submodule(name).named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    block_flops, other_flops = _flops(model, called, blocks, count)
    return Facts(
        num_blocks=count,
        dim=model.get_output_embeddings().weight.shape[1],
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_seq_len=_context(model.config),
        embedding=embedding,
        blocks=blocks,
        head=head,
        rules=by_pattern(rules, blocks),
        regions=all_by_pattern(regions, modules, blocks),
        attentions=called.attentions,
        recurrences={name: module.recurrence() for name, module in model.named_modules()
                     if isinstance(module, GatedDeltaNet | Mamba)},
        experts=experts,
        routers=routers_of(model, called, experts, blocks),
        convolutions=tuple(name for name, module in model.named_modules() if isinstance(module, CausalConvolution)),
        results={name: items for name, items in called.results.items() if name in {*regions, *called.attentions}
                 or name.rpartition(".")[0] == blocks},
        masks_documents=_masks_documents(model, called, blocks, count),
        parameters=by_pattern(values, blocks),
        eager=called.eager,
        buffers=tuple(name for name, _ in model.named_buffers()),
        tied=_tied(args, model),
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        num_active_params=_active(model, called),
        block_flops=block_flops,
        other_flops=other_flops,
    )  # fmt: skip


def _tied(args: HFArgs, model: Any) -> dict[str, str]:
    try:
        return library.tied(model)
    except ValueError as error:
        raise refusal(args, str(error)) from error


def _blocks(args: HFArgs, model: Any) -> str:
    """Return the name of the list of blocks: in the base model, or in the only module with parameters that it has."""
    name = library.base_name(model)
    while True:
        children = {
            child: module
            for child, module in model.get_submodule(name).named_children()
            if any(True for _ in module.parameters())
        }
        lists = [child for child, module in children.items() if isinstance(module, nn.ModuleList)]
        if len(lists) == 1:
            return f"{name}.{lists[0]}"
        if lists or len(children) != 1:
            found = ", ".join(lists) or "none"
            raise refusal(args, f"Titan needs one list of blocks, and the model has {found}")
        name = f"{name}.{next(iter(children))}"


def _ends(args: HFArgs, model: Any, called: Trace, blocks: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules before and after the blocks: those of the library's plan, or in the order of their calls."""
    trunk = blocks.rpartition(".")[0]
    owned = [name for name, child in _children(model, trunk) if any(True for _ in child.parameters()) and name != blocks]
    order = [name for name in called.calls if name in owned or name == f"{blocks}.0"]
    plan = [f"{library.base_name(model)}.{name}" for name in library.pipeline_plan(model)]
    if blocks in plan:
        order = [f"{blocks}.0" if name == blocks else name for name in plan if name in owned or name == blocks]
    if f"{blocks}.0" not in order:
        raise refusal(args, f"its forward does not call the blocks {blocks!r}")
    if missing := sorted(set(owned) - set(order)):
        raise refusal(args, f"its forward does not pass hidden states through {missing[0]!r}, which has parameters")
    first = order.index(f"{blocks}.0")
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    before, after = tuple(order[:first]), tuple(order[first + 1 :])
    return before, after if head in after else (*after, head)


def _children(model: Any, trunk: str) -> list[tuple[str, nn.Module]]:
    """Return the modules beside the blocks, which are in ``trunk``, and those beside the base model, except the head."""
    inner = [(f"{trunk}.{name}", child) for name, child in model.get_submodule(trunk).named_children()]
    head, base = model.get_output_embeddings(), library.base_name(model)
    return inner + [(name, child) for name, child in model.named_children() if name != base and child is not head]


def _require_once(args: HFArgs, called: Trace, units: list[str]) -> None:
    for name in units:
        if called.calls.get(name, 0) != 1:
            why = (
                f"its forward calls {name!r} {called.calls.get(name, 0)} times, and each part of a model must be called once"
            )
            raise refusal(args, why)


_NO_LIMIT = 1 << 20
"""Positions of models whose config has no limit, such as recurrent ones."""


def _context(config: Any) -> int:
    lengths = (getattr(config, key, None) for key in ("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx"))
    return next((length for length in lengths if isinstance(length, int)), _NO_LIMIT)


def _masks_documents(model: Any, called: Trace, blocks: str, count: int) -> bool:
    """Whether each block mixes positions by attention or Titan's recurrences alone, to which documents' ids are passed."""
    recurrent = [name for name, module in model.named_modules() if isinstance(module, GatedDeltaNet | Mamba)]
    mixing = {name.removeprefix(f"{blocks}.").partition(".")[0] for name in (*called.attentions, *recurrent)}
    passed = all(one.documents for one in called.attentions.values())
    return passed and len(mixing) == count and not any(isinstance(module, nn.Conv1d) for module in model.modules())


def _flops(model: Any, called: Trace, blocks: str, count: int) -> tuple[tuple[float, ...], float]:
    """Return the floating-point operations per token of each block, and of the head: 6 per element of a matrix, of those of
    the experts a token's share."""
    per_block, other = [0.0] * count, 0.0
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        share = _share(name, parameter, called) if parameter.dim() == 3 else 1.0
        if name.startswith(f"{blocks}.") and parameter.dim() > 1:
            per_block[int(name.removeprefix(f"{blocks}.").partition(".")[0])] += 6.0 * share * parameter.numel()
        elif parameter is head:
            other += 6.0 * parameter.numel()
    return tuple(per_block), other


def _share(name: str, parameter: nn.Parameter, called: Trace) -> float:
    """Return the share of a parameter that a token uses: all, or its experts' share of one that holds an expert at each
    index."""
    module = name.rpartition(".")[0]
    return called.experts[module] / parameter.shape[0] if module in called.experts else 1.0


def _active(model: Any, called: Trace) -> int | None:
    """Return the number of parameters that a token uses; ``None``: all."""
    used = sum(round(parameter.numel() * _share(name, parameter, called)) for name, parameter in model.named_parameters())
    return used if called.experts else None


def refused(args: HFArgs) -> str | None:
    """Return why the model is refused; ``None`` if it is not."""
    try:
        derive(args)
    except UserError as error:
        return "; ".join(problem.why for problem in error.problems)
    return None


V = TypeVar("V")


def by_pattern(values: Mapping[str, V], blocks: str) -> dict[str, V]:
    """Return the values of names by patterns, of which the first that matches a name has its value.

    Names within blocks (``model.layers.3.mlp.down_proj.weight``) share a pattern (``model.layers.*.mlp.down_proj.weight``)
    if they share the value.
    """
    shared: dict[str, list[V]] = {}
    for name, value in values.items():
        shared.setdefault(_pattern(name, blocks), []).append(value)
    found = {pattern: same[0] for pattern, same in shared.items() if all(one == same[0] for one in same)}
    # The longest first: a wildcard also matches dots.
    patterns = dict(sorted(found.items(), key=lambda item: -len(item[0])))
    single = {name: value for name, value in values.items() if _first(name, patterns) != value}
    used = {_matching(name, {**single, **patterns}) for name in values}
    return {pattern: value for pattern, value in {**single, **patterns}.items() if pattern in used}


def all_by_pattern(names: Iterable[str], everything: Iterable[str], blocks: str) -> tuple[str, ...]:
    """Return patterns that match ``names`` and none of ``everything`` besides."""
    wanted = set(names)
    found = by_pattern({name: name in wanted for name in everything}, blocks)
    chosen = [pattern for pattern, value in found.items() if value]
    exact = all(matches(name, chosen) == (name in wanted) for name in everything)
    return tuple(chosen) if exact else tuple(sorted(wanted))


def _pattern(name: str, blocks: str) -> str:
    inner = name.removeprefix(f"{blocks}.")
    number, dot, rest = inner.partition(".")
    return f"{blocks}.*.{rest}" if inner != name and dot and number.isdigit() else name


def _matching(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if matches(name, [pattern])), None)


def _first(name: str, values: Mapping[str, V]) -> V | None:
    pattern = _matching(name, values)
    return None if pattern is None else values[pattern]
