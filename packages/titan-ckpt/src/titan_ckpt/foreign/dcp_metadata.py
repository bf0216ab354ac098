"""Reading ``.metadata`` of a ``torch.distributed.checkpoint`` (DCP) folder without executing what it contains.

The file is a pickle of torch's ``Metadata``. :class:`_Unpickler` resolves only the names that this class and its contents
use, and resolves each to an inert stand-in: no function of torch, or of any other module, is called. The stand-ins are then
checked and converted. Checked with files of torch 2.1 to 2.15.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from titan_ckpt.format.catalogue import DCP_METADATA
from titan_ckpt.format.dtypes import ITEM_BYTES
from titan_ckpt.format.manifest_checks import cover_problem
from titan_core.api import UserError
from titan_core.toolkit.files import read_bytes

_VERSION: Final = "1."
"""What ``Metadata.version`` begins with; torch before 2.8 writes none."""

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS: Final[frozenset[tuple[str, str]]] = frozenset(
    {
        *(
            (_METADATA, name)
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        (_SHARDED, "TensorProperties"),  # before torch 2.3
        (_SHARDED, "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        *(
            (module, name)  # StorageMeta.checkpoint_id
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)  # fmt: skip
"""Classes and functions that become records."""
_FIELDS: Final = {
    "Metadata": {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "BytesStorageMetadata": set(),
    "MetadataIndex": {"fqn", "offset", "index"},
    "_StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
}
"""Known fields of the records whose contents matter. A newer field may change the meaning of the others."""


@dataclass(frozen=True)
class DcpChunk:
    """A rectangular part of a tensor, and the location of its ``torch.save`` archive."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor, divided into chunks that cover it exactly."""

    dtype: str
    """Name of the dtype without ``torch.``."""
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class DcpObject:
    """A value that is not a tensor: its ``torch.save`` archive is in ``file``."""

    file: str
    start: int
    num_bytes: int


class _Record:
    """Stands in for an object of a class in :data:`_RECORDS`. Keeps its arguments and state as they are in the pickle."""

    kind = ""

    def __new__(cls, *arguments: Any) -> _Record:
        record = object.__new__(cls)
        record.arguments = arguments
        record.state = {}
        return record

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Refused(Exception):
    """A pickle names something that DCP's metadata does not contain."""


class _Unpickler(pickle.Unpickler):
    """Resolves the names in :data:`_RECORDS`, dtypes and ``torch.Size``, and refuses all others."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Classes of this object alone: a pickle can set attributes of the classes that it names.
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """See :meth:`pickle.Unpickler.find_class`.

        Raises:
            _Refused: the name is not allowed.
        """
        key = module, name
        if key in _RECORDS:
            return self._classes.setdefault(key, type(name, (_Record,), {"kind": name}))
        if key == ("torch", "Size"):
            return tuple
        if key == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in ITEM_BYTES:
            return name
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse external objects: see :meth:`pickle.Unpickler.persistent_load`."""
        raise _Refused(f"an external object {str(pid)[:60]!r}")


_LONGEST: Final = 256 * 2**20
"""Bytes of the metadata, of which each chunk of a tensor takes about 100."""


class _Damaged(Exception):
    """The metadata contradicts itself, or contains something of the wrong type."""


def read_metadata(folder: Path) -> dict[str, DcpTensor | DcpObject]:
    """Return the entries of the DCP checkpoint in ``folder`` by name, after checking that chunks cover every tensor and are
    in files of the folder.

    Raises:
        UserError: ``.metadata`` cannot be read, names something that DCP does not write, or is damaged or too new.
    """
    path = folder / DCP_METADATA
    try:
        return _entries(_Unpickler(io.BytesIO(read_bytes(path, longest=_LONGEST, inside=folder))).load())
    except _Refused as error:
        why = f"is a pickle that contains {error}, which DCP's metadata never does; nothing of it was executed"
        raise UserError.one(str(path), why, "do not load this file with torch either, unless you trust its origin") from None
    except _Damaged as error:
        raise UserError.one(str(path), str(error), "copy the folder again, or use another checkpoint") from None
    except OSError as error:
        raise UserError.one(str(path), f"cannot be read: {error.strerror or error}", "check its permissions") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises any type, e.g. IndexError, TypeError, MemoryError
        why = f"is not DCP's metadata, or damaged: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UserError.one(str(path), why, "copy the folder again, or use another checkpoint") from None


def _entries(root: Any) -> dict[str, DcpTensor | DcpObject]:
    metadata = _fields(root, "Metadata")
    version = metadata.get("version")
    if version is not None and not (isinstance(version, str) and version.startswith(_VERSION)):
        raise _Damaged(f"has version {version!r}, but only versions {_VERSION}* are supported")
    places = _places(metadata.get("storage_data"))
    entries: dict[str, DcpTensor | DcpObject] = {}
    for name, stored in _typed(metadata.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        _typed(name, str, "a name")
        if isinstance(stored, _Record) and stored.kind == "BytesStorageMetadata":
            _fields(stored, "BytesStorageMetadata")
            entries[name] = DcpObject(*_place(places, name, None))
        else:
            entries[name] = _tensor(name, _fields(stored, "TensorStorageMetadata"), places)
    if unlisted := {name for name, _ in places} - entries.keys():
        raise _Damaged(f"locates {min(unlisted)}, but does not describe it")
    return entries


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[tuple[str, Any], tuple[str, int, int]]) -> DcpTensor:
    properties = fields.get("properties")
    if not isinstance(properties, _Record) or properties.kind != "TensorProperties":
        raise _Damaged(f"{name} has no TensorProperties")
    state = _typed(properties.state, tuple, f"the properties of {name}")
    dtype = state[0] if state else None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _Damaged(f"{name} has no known dtype")
    shape = _sizes(fields.get("size"), name)
    chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], DcpChunk] = {}
    for record in _typed(fields.get("chunks"), list, f"the chunks of {name}"):
        box = _fields(record, "ChunkStorageMetadata")
        offset, size = _sizes(box.get("offsets"), name), _sizes(box.get("sizes"), name)
        inside = len(offset) == len(size) == len(shape) and all(
            first + length <= whole for first, length, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise _Damaged(f"{name} has a chunk out of bounds: offset {list(offset)}, shape {list(size)} in {list(shape)}")
        # A rank without a share of an uneven division saves an empty chunk, at an offset that others may have too.
        if math.prod(size) or not math.prod(shape):
            chunks[offset, size] = DcpChunk(offset, size, *_place(places, name, offset))
    problem = cover_problem(tuple(chunks.values()), shape)
    if problem:
        raise _Damaged(f"{name} {problem}")
    return DcpTensor(dtype, shape, tuple(chunks.values()))


def _places(storage_data: Any) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """Return file, first byte and number of bytes of each object and of each chunk, by name and offset."""
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in _typed(storage_data, dict, "storage_data").items():
        key, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset = _typed(key.get("fqn"), str, "a name"), key.get("offset")
        if place.get("transform_descriptors"):
            raise _Damaged(f"{name} is stored with a transform ({place['transform_descriptors']}), which is not supported")
        file = _typed(place.get("relative_path"), str, f"the file of {name}")
        if file != Path(file).name or "\\" in file or "\0" in file:
            raise _Damaged(f"locates {name} in {file!r}, which is not a file of its folder")
        start, length = _sizes((place.get("offset"), place.get("length")), name)
        where = name, None if offset is None else _sizes(offset, name)
        if where in places:
            raise _Damaged(f"locates {name} twice")
        places[where] = file, start, length
    return places


def _place(
    places: Mapping[tuple[str, Any], tuple[str, int, int]], name: str, offset: tuple[int, ...] | None
) -> tuple[str, int, int]:
    try:
        return places[name, offset]
    except KeyError:
        at = "" if offset is None else f" at offset {list(offset)}"
        raise _Damaged(f"does not locate {name}{at}") from None


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or record.kind != kind:
        raise _Damaged(f"contains a {type(record).__name__} in place of a {kind}")
    state = _typed(record.state, dict, f"a {kind}")
    if unknown := state.keys() - _FIELDS[kind]:
        raise _Damaged(f"has a {kind} with an unknown field {min(map(str, unknown))!r}: was it written by a newer torch?")
    return dict(state)


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise _Damaged(f"{name} has a size or position that is not made of whole numbers")
    return value


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise _Damaged(f"has a {type(value).__name__} in place of {what}")
    return value
