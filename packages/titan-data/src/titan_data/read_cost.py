"""Cost of the order of a dataset: bytes and requests for a byte that is used, computed from the places of its documents."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from titan_core.api.plugins.assembled_job import AssembledJob

_PAGE: Final = 4096
_DOCUMENTS: Final = 2000
"""Number of documents of each shard that are counted, at least: up to the end of a window of blocks."""
_SHARDS: Final = 8
"""Number of shards that are counted, at most."""
_KEPT: Final = 128 << 20
"""Bytes that are not read again, of groups of rows that are decoded as a whole: those that have some four times as many in
memory, which :mod:`titan_data.row_groups` keeps."""


class _Kept:
    """The ranges of bytes that were read last."""

    def __init__(self) -> None:
        self._ranges: OrderedDict[tuple[Path, int, int], None] = OrderedDict()
        self._bytes = 0

    def has(self, file: Path, begin: int, end: int) -> bool:
        """Return whether a range is kept; it is from now on."""
        found = (file, begin, end) in self._ranges
        self._ranges[file, begin, end] = None
        self._ranges.move_to_end((file, begin, end))
        self._bytes += 0 if found else end - begin
        while self._bytes > _KEPT and len(self._ranges) > 1:
            (_, first, last), _ = self._ranges.popitem(last=False)
            self._bytes -= last - first
        return found


@dataclass
class ReadCost:
    """Sums over some documents. A request is a range of bytes that does not begin where the one before it ended."""

    useful: int = 0
    """Bytes of documents."""
    read: int = 0
    """Bytes of the pages that contain them."""
    requests: int = 0

    @property
    def figures(self) -> dict[str, float | None]:
        """Bytes that are read for a useful byte, and requests for a useful MiB; ``None`` if they are not known."""
        if not self.useful:
            return {"bytes_per_useful_byte": None, "requests_per_useful_mib": None}
        return {
            "bytes_per_useful_byte": self.read / self.useful,
            "requests_per_useful_mib": self.requests / self.useful * 2**20,
        }

    def __str__(self) -> str:
        if not self.useful:
            return "the cost of reading is not known, because the dataset does not say where its documents are"
        mean, per_mib = self.read / self.requests / 1024, self.requests / self.useful * 2**20
        return (
            f"{self.read / self.useful:.2f} bytes are read for each useful byte, and {per_mib:.2f} requests are made for "
            f"each useful MiB, of {mean:,.0f} KiB each"
        )


def read_costs(job: AssembledJob) -> dict[str, ReadCost]:
    """Return the cost of reading each dataset of ``job``, by name.

    Raises:
        UserError: a dataset is invalid.
    """
    shards = job.data.plan.logical_shards
    costs = {}
    for dataset in job.data.datasets:
        source = dataset.build.load()(dataset.context)
        cost, kept = ReadCost(), _Kept()
        costs[dataset.name] = cost
        for index in range(min(shards, _SHARDS)):
            _count(cost, kept, source, index, shards, whole_windows=job.data.shuffle == "blocks")
    return costs


def _count(cost: ReadCost, kept: _Kept, source: Any, index: int, count: int, *, whole_windows: bool) -> None:
    requests = getattr(source, "requests", None)  # streams and third-party sources have none
    last: tuple[Path, int] | None = None
    for number, (size, ranges) in enumerate(requests(index, count, 0) if requests is not None else ()):
        if number >= _DOCUMENTS and (ranges or not whole_windows):
            break
        cost.useful += size
        for file, begin, end in ranges:
            if kept.has(file, begin, end):
                continue
            first, upto = begin // _PAGE, -(-end // _PAGE)
            if last is not None and last[0] == file and first <= last[1] <= upto and begin >= (last[1] - 1) * _PAGE:
                first = last[1]  # continues the request before it
            else:
                cost.requests += 1
            cost.read += (upto - first) * _PAGE
            last = file, upto
