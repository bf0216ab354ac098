"""How a model family's weights are called and laid out elsewhere, as its plugin declares it. Free of torch: a checkpoint
plugin reads files, and these descriptions say what it finds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from titan_core.api.ref import Ref


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter in another format."""

    name: str
    """What it is called there."""
    parameter: str
    """What it is called here."""
    row_order: tuple[int, ...] = ()
    """Where rows are ordered otherwise, within blocks of ``len(row_order)`` rows: row ``j`` of a block here is row
    ``row_order[j]`` of that block there. Empty: the same order."""
    split: Literal[0, 1] | None = None
    """The dimension along which files of a format that divides tensors over files have divided it."""
    copy: bool = False
    """Whether this is a second name of a parameter that is listed under its own name too (a head that shares the embedding's
    weight). Files may have it or not; if they do, it must be the same tensor. It is never written."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A format that weights may be read from, and perhaps written to."""

    name: Literal["hf", "meta"]
    """The files: "hf", a folder of safetensors with ``config.json``; "meta", ``consolidated.*.pth`` with ``params.json``."""
    tensors: Ref[Callable[[Any], Sequence[ForeignTensor]]]
    """Arguments of the model -> all its tensors."""
    to_args: Ref[Callable[[Mapping[str, Any]], BaseModel]]
    """Contents of the config file there -> arguments of the model. Raises ``ValueError`` with a reason where there are none
    that would be the same model."""
    from_args: Ref[Callable[[Any], dict[str, Any]]] | None = None
    """Arguments of the model -> contents of the config file there, for a format that can be written."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that files may have and that say nothing, such as tables that are computed. Any other tensor that
    ``tensors`` does not list is refused."""
