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
    """A parameter in another format: which tensors it consists of there, and how their elements are arranged.

    A tensor of the other format is transposed first, if it is stored so; then its rows (dimension 0) are selected; then the
    rows of all :attr:`pieces` follow one another. Whole tensors with the same elements in the same order need a name only::

        ForeignTensor("wte.weight", "embedding.weight")
        ForeignTensor("c_attn.weight", "attention.wk.weight", rows=range(768, 1536), row_block=2304, transpose=True)
        ForeignTensor("experts.*.w1", "experts.w1", pieces=tuple((f"experts.{i}.w1", hidden) for i in range(num_experts)))
    """

    name: str
    """Name in the other format. That of several :attr:`pieces` stands for them in messages only."""
    parameter: str
    """Name of the parameter or persistent buffer in Titan."""
    rows: Sequence[int] = ()
    """Which rows of the other format are this parameter's, and in which order, within blocks of :attr:`row_block` rows:
    row ``j`` of a block in Titan is row ``rows[j]`` of that block in the other format. Other parameters have the other rows
    (keys and values beside the queries). Empty: all rows in the same order."""
    row_block: int = 0
    """Number of rows of a block in the other format; 0: as many as :attr:`rows` has, which differ in their order only."""
    transpose: bool = False
    """Whether the other format stores the last two dimensions in the opposite order (``[in, out]`` of a linear layer)."""
    pieces: tuple[tuple[str, int], ...] = ()
    """Names of the tensors that the parameter consists of, in order, each with the number of the parameter's rows in it. If
    they are more than the parameter's first dimension, its first two dimensions count as rows: a stack of experts."""
    buffer: bool = False
    """Whether it is a persistent buffer, which keeps its dtype if the weights are converted to another."""
    split: Literal[0, 1] | None = None
    """Dimension along which a format with several files splits the tensor over them."""
    copy: bool = False
    """Whether this is a second name of a parameter that is also listed under its own name (a head that shares the
    embedding's weight). If a file has it, it must be the same tensor. It is never written."""
    aliases: tuple[str, ...] = ()
    """Names that the tensor has in other versions of the format. Files may use any one of them; :attr:`name` is written."""

    def __post_init__(self) -> None:
        block = self.block
        if len(set(self.rows)) != len(self.rows) or not all(0 <= row < block for row in self.rows):
            raise ValueError(f"rows of {self.name!r} must be different rows of a block of {block}")
        if self.pieces and (self.aliases or len(dict(self.pieces)) != len(self.pieces)):
            raise ValueError(f"{self.name!r} has the same piece twice, or aliases, which only a single tensor may have")

    @property
    def block(self) -> int:
        """Number of rows of a block in the other format."""
        return self.row_block or len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the other format."""
        return tuple(name for name, _ in self.pieces) or (self.name,)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A format from which weights can be read. Those in "dcp" files, and those with ``from_args``, can also be written."""

    files: str
    """The files, by their name in the checkpoint plugin. titan-ckpt reads "safetensors", with ``config.json``;
    "consolidated", Meta's ``consolidated.*.pth`` with ``params.json``; and "dcp", a folder of
    ``torch.distributed.checkpoint`` with the names that TorchTitan uses for the model. Only a model whose names differ there
    needs to declare "dcp"."""
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
    priority: int = 0
    """Of several formats that accept a config file, the one with the highest priority is used. Two with the same are an
    error: a model that accepts what others describe better has a negative one."""


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
