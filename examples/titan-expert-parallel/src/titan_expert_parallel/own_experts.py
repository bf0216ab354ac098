"""Modules that hold experts, and their calls with some of the experts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from titan_core.api.layout import ModelLayout
from titan_core.api.layout_rules import Experts


def experts_in(module: nn.Module, path: str, layout: ModelLayout) -> dict[str, Experts]:
    """Of the parameters that ``module``, called ``path``, owns itself, those that hold experts."""
    rules = {name: layout.rule(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)}
    return {name: rule for name, rule in rules.items() if isinstance(rule, Experts)}


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the code of ``module`` finds ``tensors`` where it reads its parameters of those names."""
    parameters: dict[str, Any] = module._parameters
    whole = {name: parameters[name] for name in tensors}
    parameters.update(tensors)
    try:
        yield
    finally:
        parameters.update(whole)
