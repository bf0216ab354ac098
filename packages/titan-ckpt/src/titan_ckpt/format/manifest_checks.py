"""Validating the JSON of a manifest and converting it to a :class:`~titan_ckpt.format.stored.Manifest`."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from titan_ckpt.format.dtypes import ITEM_BYTES
from titan_ckpt.format.layout import Layout, layout_of, number_of_pieces
from titan_ckpt.format.stored import (
    DATA_FILE,
    FORMAT,
    MODEL,
    MOST_FILES,
    NAME,
    OBSERVERS,
    OPTIMIZER,
    BrokenCheckpoint,
    DataFile,
    Manifest,
    StoredTensor,
    data_file,
    is_file_name,
    of_replica,
    tensors_in,
)
from titan_core.toolkit.text import shorten

_KINDS = tuple(f"{kind}." for kind in (MODEL, OPTIMIZER, OBSERVERS))


def _data_file(name: str) -> str:
    # A bare file name, so that no path can lead out of the folder.
    if not DATA_FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a data file")
    return name


def _time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("has no time zone")
    return text


def _tokenizer_file(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{shorten(name)!r} is not the name of a file")
    return name


Count = Annotated[int, Field(ge=0, lt=2**63)]
_ENTRY_BYTES = 64
"""An entry of an index is longer than its checksum."""


class Box(Protocol):
    """A rectangular part of a tensor."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Index of its first element."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its number of elements in each dimension."""
        ...


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


_Run = Annotated[list[int], Field(min_length=3, max_length=3)]


class _Layout(_Strict):
    cuts: Annotated[list[list[_Run]], Field(max_length=64)]
    files: list[_Run]


_Tensor = tuple[str, int]
_File = tuple[Count, Count, str]


class About(BaseModel):
    """The entries of ``about`` that titan-ckpt reads; others are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str = ""
    model_name: str = ""
    model_args: dict[str, Any] = Field(default_factory=dict)
    mesh: dict[str, int] = Field(default_factory=dict)
    world_size: int = 1
    diverging_replicas: Annotated[int, Field(ge=1, lt=2**31)] = 1
    torch: str = ""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    decisive: list[str] = Field(default_factory=list)
    plugins: dict[str, str] = Field(default_factory=dict)
    global_batch_size: int | None = None
    tokenizer: dict[str, list[int]] = Field(default_factory=dict)
    hf: dict[str, dict[str, Any]] = Field(default_factory=dict)


class _Generators(_Strict):
    ranks: list[Count]
    """First rank of each range of ranks that have these states, and the one after its last."""
    python: list[Any] | int
    cpu: str | int
    cuda: str | None = None


class _Loader(_Strict):
    stream_of: dict[str, Any]
    shards: dict[str, dict[str, Any]]


class _Group(_Strict):
    built: dict[str, Any]
    now: dict[str, Any]


class _Own(_Strict):
    state: dict[str, Any]
    extra: dict[str, Any]


class _Optimizer(_Strict):
    parameters: dict[str, dict[str, Any]]
    groups: list[_Group]
    group_of: dict[str, Count]
    own: _Own

    @model_validator(mode="after")
    def _groups_of_all(self) -> _Optimizer:
        if self.group_of.keys() != self.parameters.keys() or any(
            group >= len(self.groups) for group in self.group_of.values()
        ):
            raise ValueError("a parameter has no group")
        return self


class _State(_Strict):
    """State that is not a tensor, as collected by :mod:`titan_ckpt.contents.state`."""

    step: Count
    tokens_seen: Count
    tokens_by_dataset: dict[str, Count]
    lr_scheduler: dict[str, Any]
    optimizer: _Optimizer
    loader: _Loader
    mesh: dict[str, int]
    generators: list[_Generators]
    observers: dict[str, Any]


class _Contents(_Strict):
    format: int
    step: Count
    created: Annotated[str, AfterValidator(_time)]
    about: About
    state: dict[str, Any]
    files: dict[Annotated[str, AfterValidator(_data_file)], Annotated[_File, Field(strict=False)]]
    layouts: list[_Layout]
    tensors: dict[str, Annotated[_Tensor, Field(strict=False)]]
    tokenizer: dict[Annotated[str, AfterValidator(_tokenizer_file)], str] = Field(
        default_factory=dict, max_length=MOST_FILES
    )


def checked_manifest(contents: Any) -> Manifest:
    """Convert the JSON ``contents`` of a manifest.

    Raises:
        BrokenCheckpoint: a value has the wrong type, or contradicts another value.
    """
    found = contents.get("format") if isinstance(contents, dict) else None
    if found != FORMAT:
        raise BrokenCheckpoint(f"it has format {found!r}, but this version of titan-ckpt reads format {FORMAT}")
    try:
        checked = _Contents.model_validate(contents)
        if checked.state:
            _require_state(checked.state)
            if checked.state["step"] != checked.step:
                raise BrokenCheckpoint(f"{NAME} is of step {checked.step}, but its state is of step {checked.state['step']}")
    except ValidationError as error:
        raise BrokenCheckpoint(f"{NAME} is damaged: {_first(error)}") from None
    layouts = _layouts(checked.layouts, checked.tensors, checked.files)
    for name, (dtype, _) in checked.tensors.items():
        if dtype not in ITEM_BYTES:
            raise BrokenCheckpoint(f"{name} has unknown dtype {dtype!r}")
    tensors = {name: StoredTensor(dtype, layouts[number]) for name, (dtype, number) in checked.tensors.items()}
    _require_known_names(tensors, checked.about.diverging_replicas)
    if checked.state:
        stored = {name for name in tensors if name.startswith("optimizer.")}
        unmatched = stored ^ set(tensors_in(checked.state["optimizer"]))
        if unmatched:
            name = min(unmatched)
            known, lacking = ("tensors", "optimizer state") if name in stored else ("optimizer state", "tensors")
            raise BrokenCheckpoint(f"{name} is listed in the {known}, but not in the {lacking}")
    about = contents["about"]
    files = {name: DataFile(*file) for name, file in checked.files.items()}
    return Manifest(checked.step, checked.created, about, checked.state, tensors, files, checked.tokenizer)


def _require_state(state: dict[str, Any]) -> None:
    try:
        _State.model_validate(state)
    except ValidationError as error:
        raise BrokenCheckpoint(f"{NAME} is damaged: {_first(error, 'state')}") from None


def _first(error: ValidationError, *parents: str) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, (*parents, *first['loc'])))}: {first['msg']}"


def _layouts(found: Sequence[_Layout], tensors: Mapping[str, _Tensor], files: Mapping[str, _File]) -> list[Layout]:
    """Convert the layouts, after checking that the files have as many pieces, so that a small manifest takes little memory.

    Raises:
        BrokenCheckpoint: a layout is no grid of pieces in these files.
    """
    known = set(files)
    try:
        counts = [number_of_pieces(runs.cuts, runs.files) for runs in found]
        if any(not 0 <= number < len(found) for _, number in tensors.values()):
            raise BrokenCheckpoint(f"{NAME} is damaged: a tensor has a layout that it does not list")
        used = Counter(number for _, number in tensors.values())
        listed = sum(index_bytes for _, index_bytes, _ in files.values()) // _ENTRY_BYTES
        if len(used) != len(found) or sum(counts[number] * times for number, times in used.items()) > listed:
            raise BrokenCheckpoint(
                f"{NAME} is damaged: it has more pieces of tensors than the indexes of its files can list"
            )
        layouts = [layout_of(runs.cuts, runs.files) for runs in found]
    except ValueError as error:
        raise BrokenCheckpoint(f"{NAME} is damaged: a layout {error}") from None
    for layout in layouts:
        if missing := next((name for name in map(data_file, layout.files) if name not in known), None):
            raise BrokenCheckpoint(f"a tensor has a piece in {missing}, which the checkpoint does not list")
    return layouts


def cover_problem(chunks: Sequence[Box], shape: tuple[int, ...]) -> str:
    """Return why ``chunks``, all within bounds, do not cover a tensor of this shape exactly; ``""`` if they do."""
    covered = sum(math.prod(chunk.shape) for chunk in chunks)
    if covered < math.prod(shape) or not chunks:
        return f"is incomplete: its chunks cover {covered} of {math.prod(shape)} elements"
    if covered > math.prod(shape) or _overlap(chunks, shape):
        return "has overlapping chunks"
    return ""


def _require_known_names(tensors: Mapping[str, StoredTensor], replicas: int) -> None:
    """Require every tensor name to have a known prefix, and each diverging replica to have the same tensors as the first."""
    of_first = {name: stored for name, stored in tensors.items() if name.startswith(_KINDS)}
    if len(tensors) != len(of_first) * replicas:
        expected = f"{replicas} replica(s) with {len(of_first)} tensors whose names this version of titan-ckpt knows"
        raise BrokenCheckpoint(f"it has {len(tensors)} tensors, expected {expected}")
    for replica in range(1, replicas if tensors else 1):
        for name, stored in of_first.items():
            other = tensors.get(of_replica(replica) + name)
            if other is None or (other.shape, other.dtype) != (stored.shape, stored.dtype):
                why = f"is missing from replica {replica} of {replicas}, or has another shape or dtype there"
                raise BrokenCheckpoint(f"{name} {why}")


def _overlap(chunks: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether an element is in two of ``chunks``. The borders of the chunks divide the tensor into cells, of which there are
    few if the division is regular; no cell may be in two chunks."""
    if len(chunks) == 1:
        return False
    borders = [
        sorted({0, size, *(c.offset[dim] for c in chunks), *(c.offset[dim] + c.shape[dim] for c in chunks)})
        for dim, size in enumerate(shape)
    ]
    index = [{border: number for number, border in enumerate(of_dim)} for of_dim in borders]
    seen: set[tuple[int, ...]] = set()
    for chunk in chunks:
        spans = (
            range(places[first], places[first + size])
            for places, first, size in zip(index, chunk.offset, chunk.shape, strict=True)
        )
        for cell in product(*spans):
            if cell in seen:
                return True
            seen.add(cell)
    return False
