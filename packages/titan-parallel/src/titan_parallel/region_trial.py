"""Trying how tensor parallelism divides a region: in one process, rank by rank, on a small copy of the model.

A layout's rules are a claim: that a region computes the same from shares of its parameters, once what ranks compute is
summed where the region ends. A layer that holds queries, keys and values side by side breaks it without an error: the
first rank's share then has queries and half of the keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titan_core.api.layout import ModelLayout
from titan_core.api.layout_rules import Column, Experts, Row, Rule, Shard
from titan_core.api.model_trial import Around, ModelTrial
from titan_core.api.tools.patterns import matches

_PERIOD = 8
"""Columns after which a trial's products with large weights repeat themselves."""


def region_faults(trial: ModelTrial, ranks: int) -> dict[str, str]:
    """By region, what goes wrong where ``ranks`` ranks compute it from their shares; regions that are right are left out."""
    faults: dict[str, str] = {}

    def compare(name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        expected = forward(*arguments, **keywords)
        region = _Region(name, trial.module(name), trial.layout, ranks)
        if region.can_be_tried():
            fault = region.fault(partial(forward, *arguments, **keywords), partial(trial.same, expected=expected))
            if fault is not None:
                faults[name] = fault
        return expected

    regions = {call.name for call in trial.calls if matches(call.name, trial.layout.regions)}
    around: dict[str, Around] = {name: partial(compare, name) for name in regions}
    trial.run(trial.tokens, trial.positions, around=around)
    return faults


_Call = tuple[int, int]
"""A module, by its id, and which of its calls it is."""


class _Stop(Exception):
    """A rank cannot go further without what other ranks compute."""


class _Region:
    def __init__(self, name: str, module: nn.Module, layout: ModelLayout, ranks: int) -> None:
        self._module, self._ranks = module, ranks
        self._parameters = [
            (owner, leaf, parameter, layout.rule(".".join(filter(None, (name, path, leaf)))))
            for path, owner in module.named_modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
        ]
        rows = [owner for owner, _, _, rule in self._parameters if isinstance(rule, Row)]
        sums = [one for path, one in module.named_modules() if matches(f"{name}.{path}".rstrip("."), layout.sums)]
        self._closing = {id(one): one for one in (*rows, *sums)}

    def can_be_tried(self) -> bool:
        """Products with large weights compute a few columns and repeat them, which shares of other layers would show."""
        return not any(
            isinstance(rule, Shard | Experts) or (isinstance(rule, Column) and len(parameter) % (_PERIOD * self._ranks))
            for _, _, parameter, rule in self._parameters
            if _is_large(parameter)
        )

    def fault(self, run: Callable[[], Any], same: Callable[[Any], bool]) -> str | None:
        """What differs where each rank calls ``run`` with its shares. Ranks run one after another, each up to where it needs
        a sum over ranks; with the sum of what all computed there, they begin again."""
        sums: dict[_Call, Tensor] = {}
        while True:
            outputs: list[Any] = []
            addends: list[tuple[_Call, Tensor]] = []
            for rank in range(self._ranks):
                with self._shares(rank), self._summing(sums, addends) as close:
                    try:
                        outputs.append(close(self._module, run) if id(self._module) in self._closing else run())
                    except _Stop:
                        continue
                    except Exception as error:  # noqa: BLE001 - the region works whole, so this is what dividing it does
                        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if not addends:
                return None if all(map(same, outputs)) else "it computes something else"
            if len({(call, one.shape) for call, one in addends}) > 1 or len(addends) != self._ranks:
                return "ranks differ in what they sum"
            sums[addends[0][0]] = torch.stack([one for _, one in addends]).sum(0)

    @contextmanager
    def _shares(self, rank: int) -> Iterator[None]:
        """Parameters are those of one rank."""
        for owner, leaf, parameter, rule in self._parameters:
            owner.register_parameter(leaf, self._share(leaf, parameter, rule, rank))
        try:
            yield
        finally:
            for owner, leaf, parameter, _ in self._parameters:
                owner.register_parameter(leaf, parameter)

    def _share(self, leaf: str, parameter: nn.Parameter, rule: Rule | None, rank: int) -> nn.Parameter | None:
        if isinstance(rule, Experts):
            rule = rule.within
        if isinstance(rule, Row) and leaf == "bias":
            return parameter if rank == 0 else None  # added once
        dim = {Column: 0, Row: 1}.get(type(rule), rule.dim if isinstance(rule, Shard) else None)
        if dim is None:
            return parameter
        chunks = parameter.chunk(self._ranks, dim)
        repeats = isinstance(rule, Column) and _is_large(parameter)
        share = chunks[0 if repeats else rank] if rank < len(chunks) else parameter.narrow(dim, 0, 0)
        return nn.Parameter(share, requires_grad=False)

    @contextmanager
    def _summing(self, sums: dict[_Call, Tensor], addends: list[tuple[_Call, Tensor]]) -> Iterator[Callable[..., Tensor]]:
        """Modules that close the region return what is known of ``sums``; the first that is not known ends the run."""
        calls: Counter[int] = Counter()

        def close(module: nn.Module, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Tensor:
            call = (id(module), calls[id(module)])
            calls[id(module)] += 1
            if call not in sums:
                addends.append((call, forward(*arguments, **keywords)))
                raise _Stop
            return sums[call]

        inner = [module for module in self._closing.values() if module is not self._module]
        for module in inner:
            module.forward = partial(close, module, module.forward)
        try:
            yield close
        finally:
            for module in inner:
                del module.forward


def _is_large(parameter: Tensor) -> bool:
    """Whether it is one of the trial's weights that overlap themselves in memory."""
    return parameter.dim() > 1 and parameter.stride(0) < parameter.shape[-1]
