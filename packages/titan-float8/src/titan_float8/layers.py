"""Which linear layers are converted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from titan_core.api.errors import UserError
from titan_core.api.model_part import ModelPart, PrunedModule
from titan_core.api.tools.patterns import matches


def linear_layers(
    part: ModelPart, filters: Sequence[str], convert_head: bool, multiple: int
) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers of ``part`` that are to be converted, by name.

    Args:
        filters: layers that are not: parts of names, or patterns.
        multiple: what both sides of a weight must be a multiple of; other layers stay as they are.
    """
    head = () if convert_head else part.layout.head[-1:]
    for name, module in part.named_modules():
        if not isinstance(module, nn.Linear) or any(name == one or name.startswith(f"{one}.") for one in head):
            continue
        if _is_filtered(name, filters):
            continue
        if all(size % multiple == 0 for size in module.weight.shape):
            yield name, module


def _is_filtered(name: str, filters: Sequence[str]) -> bool:
    return any(one in name for one in filters) or matches(name, filters)


def require_matches(part: ModelPart, filters: Sequence[str], section: str) -> None:
    """A filter that no layer has in its name is a mistake. Told of whole models: in a pipeline, another part may have it.

    Raises:
        UserError: saying so.
    """
    if any(isinstance(module, PrunedModule) for module in part.module.modules()):
        return
    names = [name for name, module in part.named_modules() if isinstance(module, nn.Linear)]
    for one in filters:
        if not any(_is_filtered(name, [one]) for name in names):
            why = "no linear layer of the model has such a name, so it would leave out nothing"
            raise UserError.one(f"{section}.filter_fqns: {one!r}", why, f"names are such as {names[0]!r}; or drop it")


def require_some(found: Collection[object], part: ModelPart, section: str) -> None:
    """A part with blocks of which nothing is converted is a mistake.

    Raises:
        UserError: saying so.
    """
    if not found and part.blocks():
        raise UserError.one(
            f"[{section}]",
            "no layer of the model is converted: all are filtered, or their sizes are no multiple of what the format wants",
            f"change {section}.filter_fqns, or switch it off",
        )
