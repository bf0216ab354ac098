"""The module that is trained: the library's own, which takes tokens, returns logits, and calls Titan's mixers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from titan_core.api import CausalAttention, matches
from titan_core.api.parallel.model_part import PrunedModule
from titan_models_hf import mixers, transformers_private as library
from titan_models_hf.cache import facts_of
from titan_models_hf.config import HFArgs
from titan_models_hf.experts import compute_by_rows
from titan_models_hf.rearranged import rearranged_model
from titan_models_hf.routers import return_scores
from titan_models_hf.torch_private import run_last


def build(args: HFArgs) -> nn.Module:
    """Return the model on the current default device, which must be the meta device.

    Raises:
        UserError: see :func:`titan_models_hf.cache.facts_of`.
    """
    facts = facts_of(args)
    model, _ = rearranged_model(args)
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if name in facts.results:
            _return_first(module, facts.results[name])
        if name in facts.results or matches(name, facts.regions):
            module.register_forward_pre_hook(_with_positional_hidden, with_kwargs=True)
    for name, attention in facts.attentions.items():
        modules[name].titan_mixer = CausalAttention(**attention.options)
        scale = attention.key_width**-0.5 if attention.scale is None else attention.scale
        call = mixers.Call(scale, attention.window, attention.softcap, attention.sinks)
        modules[name].titan_call = call
    for name in facts.experts:
        compute_by_rows(modules[name])
    for name, router in facts.routers.items():
        return_scores(modules[name], router.scores)
    if (items := facts.results.get(f"{facts.blocks}.0")) is not None:
        blocks: Any = modules[facts.blocks]
        kind: Any = type(blocks)
        blocks.__class__ = _calling_for_tuples(kind, items)
    cls: Any = type(model)
    model.__class__ = _decoder(cls)
    library.use_attention(model, library.EAGER if facts.eager else mixers.NAME)
    built: nn.Module = model
    return built


@cache
def _decoder(base: Any) -> type:
    """Return a subclass of the causal language model ``base`` with the signature of Titan's models."""

    def forward(self: Any, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        more = {} if documents is None else {"documents": documents}
        output = base.forward(self, input_ids=tokens, position_ids=positions, use_cache=False, **more)
        logits: Tensor = output.logits
        return logits

    return type(base.__name__, (base,), {"forward": forward})


def _with_positional_hidden(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pass the hidden states by position, as transforms expect them; a forward pre-hook."""
    cls: Any = type(module)
    first = _first_parameter(cls)
    if arguments or first not in keywords:
        return None
    keywords = dict(keywords)
    return (keywords.pop(first),), keywords


@cache
def _first_parameter(cls: Any) -> str:
    return list(inspect.signature(cls.forward).parameters)[1]


def _return_first(module: Any, items: int) -> None:
    """Let a module that returns ``(hidden, None, ...)`` return ``hidden`` to transforms, and the tuple to its caller."""
    cls: Any = type(module)
    module.__class__ = _returning_first(cls)
    more = (None,) * (items - 1)

    def as_tuple(module: nn.Module, arguments: Any, output: Any) -> tuple[Any, ...]:
        return (output, *more)

    vars(module)["_titan_last_hook"] = module.register_forward_hook(as_tuple).id


@cache
def _calling_for_tuples(base: Any, items: int) -> type:
    """Return a subclass of the list class ``base`` whose blocks return tuples to a loop over it, also those in whose place a
    pipeline stage has a module that returns its input."""

    def iterate(self: Any) -> Iterator[Any]:
        for block in base.__iter__(self):
            yield _Tupled(block, items) if isinstance(block, PrunedModule) else block

    return type(base.__name__, (base,), {"__iter__": iterate})


class _Tupled:
    """A block of another stage."""

    def __init__(self, block: PrunedModule, items: int) -> None:
        self._block, self._more = block, (None,) * (items - 1)

    def __call__(self, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        return (self._block(*arguments, **keywords), *self._more)


@cache
def _returning_first(base: Any) -> type:
    """Return a subclass of the module class ``base`` whose forward returns the first item of the result only. Hooks that are
    registered later run before the one that makes the tuple."""

    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        first: Tensor = base.forward(self, hidden_states, *arguments, **keywords)[0]
        return first

    def register_forward_hook(self: Any, *arguments: Any, **keywords: Any) -> Any:
        handle = base.register_forward_hook(self, *arguments, **keywords)
        run_last(self, vars(self).get("_titan_last_hook", handle.id))
        return handle

    return type(base.__name__, (base,), {"forward": forward, "register_forward_hook": register_forward_hook})
