"""Trained weights: their names and layouts in other formats, as the plugin of a model family declares them, and what a
checkpoint plugin finds. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from titan_core.api.plugins.ref import Ref


@dataclass(frozen=True)
class ForeignTensor:
    """A parameter in another format."""

    name: str
    """Name in the other format."""
    parameter: str
    """Name of the parameter in Titan."""
    row_order: tuple[int, ...] = ()
    """Order of rows within blocks of ``len(row_order)`` rows: row ``j`` of a block in Titan is row ``row_order[j]`` of that
    block in the other format. Empty: the same order."""
    split: Literal[0, 1] | None = None
    """Dimension along which a format with several files splits the tensor over them."""
    copy: bool = False
    """Whether this is a second name of a parameter that is also listed under its own name (a head that shares the
    embedding's weight). If a file has it, it must be the same tensor. It is never written."""
    aliases: tuple[str, ...] = ()
    """Names that the tensor has in other versions of the format. Files may use any one of them; :attr:`name` is written."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A format from which weights can be read. "dcp", and formats with ``from_args``, can also be written."""

    name: Literal["hf", "meta", "dcp"]
    """The files: "hf", a folder of safetensors with ``config.json``; "meta", ``consolidated.*.pth`` with ``params.json``;
    "dcp", a folder of ``torch.distributed.checkpoint`` with the names that TorchTitan uses for the model. Only a model whose
    names differ there needs to declare "dcp"."""
    tensors: Ref[Callable[[Any], Sequence[ForeignTensor]]]
    """Model arguments -> all tensors of the model."""
    to_args: Ref[Callable[[Mapping[str, Any]], BaseModel]] | None = None
    """Contents of the format's config file -> model arguments. Raises ``ValueError`` with a reason if no arguments describe
    the same model. ``None`` for "dcp", which has no config file."""
    notes: Ref[Callable[[Mapping[str, Any]], Sequence[str]]] | None = None
    """Contents of the format's config file -> its settings that the arguments do not represent, although the weights compute
    the same without them; one line each."""
    from_args: Ref[Callable[[Any], dict[str, Any]]] | None = None
    """Model arguments -> contents of the format's config file, if the format can be written."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that files may contain but that hold no information, such as computed tables. All other tensors
    that ``tensors`` does not list are refused."""


@dataclass(frozen=True)
class StoredModel:
    """Weights that a checkpoint plugin can load, and the model that they belong to."""

    path: str
    """The checkpoint or folder of weights."""
    sections: Mapping[str, Mapping[str, Any]]
    """Config sections by name, with the keys that describe the model, its tokenizer and, if known, the length of the
    sequences that it was trained on."""
    load: Ref[Callable[[Any], None]]
    """Loads the weights into a model, each rank those that it holds. Its argument is a
    :class:`~titan_core.api.WeightsContext`."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end a text or a turn of a chat, in addition to the tokenizer's."""
    step: int | None = None
    """Optimizer steps that the weights were trained for, if known."""
    notes: tuple[str, ...] = ()
    """Differences between the model that the files describe and the model that the sections do, although both compute the
    same; one line each."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Entries that describe the weights' origin, as plain values. Checkpoints of a run that starts from the weights keep
    them for exports."""
