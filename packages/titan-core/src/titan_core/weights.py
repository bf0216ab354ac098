"""How a model family's weights are called and laid out elsewhere, as its plugin declares it. Free of torch: a checkpoint
plugin reads files, and these descriptions say what it finds there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from titan_core.ref import Ref


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
    copies: tuple[str, ...] = ()
    """Names under which files there may hold the parameter again (a tied output layer, written out). A reader must refuse
    one that differs from the parameter, and must not ask for one that is not there; a writer writes none."""


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
