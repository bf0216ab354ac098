"""Writing a checkpoint that contains only weights, tensor by tensor, in one process."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from torch import Tensor

from titan_ckpt.format.chunks import bytes_of
from titan_ckpt.format.dtypes import dtype_name
from titan_ckpt.format.folder import Folder, write_all
from titan_ckpt.format.manifest import write_manifest
from titan_ckpt.format.stored import MODEL, Chunk, Manifest, StoredTensor, chunk_digest
from titan_ckpt.format.tokenizer_files import write_files

_FILE = "data-00000.bin"


@dataclass
class WeightsWriter:
    """Writes whole tensors one after another."""

    _file: IO[bytes]
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, parameter: str, tensor: Tensor) -> None:
        """Write the tensor of ``parameter``, a fully qualified name in the model."""
        data = bytes_of(tensor)
        write_all(self._file, data)
        name, dtype, shape = f"{MODEL}.{parameter}", dtype_name(tensor.dtype), tuple(tensor.shape)
        begin = (0,) * len(shape)
        chunk = Chunk(begin, shape, _FILE, self.num_bytes, len(data), chunk_digest(name, dtype, begin, shape, data))
        self.stored[name] = StoredTensor(dtype, shape, (chunk,))
        self.num_bytes += len(data)


@contextmanager
def written_weights(
    folder: Folder, step: int, about: Mapping[str, Any], tokenizer: Mapping[str, bytes]
) -> Iterator[WeightsWriter]:
    """Return a writer into ``folder``, which is a checkpoint once the context exits without an error.

    Args:
        step: step of the weights; 0 if unknown.
        about: see :class:`~titan_ckpt.format.stored.Manifest`.
        tokenizer: the files of the tokenizer, by name.
    """
    with folder.create(_FILE) as file:
        yield (writer := WeightsWriter(file))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    hashes = write_files(folder, tokenizer)
    write_manifest(folder, Manifest(step, created, about, {}, writer.stored, {_FILE: writer.num_bytes}, hashes))
