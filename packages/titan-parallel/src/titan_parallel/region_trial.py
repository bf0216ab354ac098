"""Trial of tensor parallelism on each region of a small copy of the model: in one process, rank by rank.

A layout's rules claim that a region computes the same result from shards of its parameters, once the ranks' outputs are
summed where the region ends. A layer with queries, keys and values side by side breaks the claim without an error: the first
rank's shard then holds the queries and half of the keys.
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
"""Number of output columns after which matmuls with a trial's large weights repeat."""


def region_faults(trial: ModelTrial, ranks: int) -> dict[str, str]:
    """Return what goes wrong when ``ranks`` ranks compute each region from their shards: region name -> fault.

    Correct regions are omitted.
    """
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
"""The id of a module, and the number of its call."""


class _Stop(Exception):
    """Raised where a rank needs what other ranks compute."""


class _Region:
    """A region whose ranks are imitated one after another."""

    def __init__(self, name: str, module: nn.Module, layout: ModelLayout, ranks: int) -> None:
        self._module, self._ranks = module, ranks
        self._parameters = [
            (owner, leaf, parameter, layout.rule(".".join(filter(None, (name, path, leaf)))))
            for path, owner in module.named_modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
        ]
        rows = [owner for owner, _, _, rule in self._parameters if isinstance(rule, Row)]
        sums = [inner for path, inner in module.named_modules() if matches(f"{name}.{path}".rstrip("."), layout.sums)]
        self._closing = {id(closing): closing for closing in (*rows, *sums)}

    def can_be_tried(self) -> bool:
        """Whether the trial can represent this region.

        Matmuls with a large weight compute a few columns and repeat them. If shards do not fit that period, the trial would
        report a fault that does not exist.
        """
        return not any(
            isinstance(rule, Shard | Experts) or (isinstance(rule, Column) and len(parameter) % (_PERIOD * self._ranks))
            for _, _, parameter, rule in self._parameters
            if _is_large(parameter)
        )

    def fault(self, run: Callable[[], Any], same: Callable[[Any], bool]) -> str | None:
        """Return what differs if each rank calls ``run`` with its shards; ``None`` if nothing does.

        Each rank in turn runs until it needs a sum over ranks. Once all ranks have computed their addends, they start again
        with that sum.
        """
        sums: dict[_Call, Tensor] = {}
        while True:
            outputs: list[Any] = []
            addends: list[tuple[_Call, Tensor]] = []
            for rank in range(self._ranks):
                with self._shards(rank), self._summing(sums, addends) as close:
                    try:
                        outputs.append(close(self._module, run) if id(self._module) in self._closing else run())
                    except _Stop:
                        continue
                    except Exception as error:  # noqa: BLE001 - the undivided region works, so dividing it caused this
                        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if not addends:
                return None if all(map(same, outputs)) else "its output differs"
            if len({(call, addend.shape) for call, addend in addends}) > 1 or len(addends) != self._ranks:
                return "ranks sum different calls or shapes"
            sums[addends[0][0]] = torch.stack([addend for _, addend in addends]).sum(0)

    @contextmanager
    def _shards(self, rank: int) -> Iterator[None]:
        """Replace the parameters by one rank's shards."""
        for owner, leaf, parameter, rule in self._parameters:
            owner.register_parameter(leaf, self._shard(leaf, parameter, rule, rank))
        try:
            yield
        finally:
            for owner, leaf, parameter, _ in self._parameters:
                owner.register_parameter(leaf, parameter)

    def _shard(self, leaf: str, parameter: nn.Parameter, rule: Rule | None, rank: int) -> nn.Parameter | None:
        if isinstance(rule, Experts):
            rule = rule.within
        if isinstance(rule, Row) and leaf == "bias":
            return parameter if rank == 0 else None  # must be added only once
        dim = {Column: 0, Row: 1}.get(type(rule), rule.dim if isinstance(rule, Shard) else None)
        if dim is None:
            return parameter
        chunks = parameter.chunk(self._ranks, dim)
        repeats = isinstance(rule, Column) and _is_large(parameter)
        shard = chunks[0 if repeats else rank] if rank < len(chunks) else parameter.narrow(dim, 0, 0)
        return nn.Parameter(shard, requires_grad=False)

    @contextmanager
    def _summing(self, sums: dict[_Call, Tensor], addends: list[tuple[_Call, Tensor]]) -> Iterator[Callable[..., Tensor]]:
        """Make the modules that close the region return their ``sums``; one without a sum records its addend and stops."""
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
    """Whether ``parameter`` is a large weight of the trial, whose rows overlap in memory."""
    return parameter.dim() > 1 and parameter.stride(0) < parameter.shape[-1]
