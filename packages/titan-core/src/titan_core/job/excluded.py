"""The documents that a job passes over (``data.exclude``). Free of torch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from titan_core.api import Config, UserError
from titan_core.api.config.sections import DataSection, JobSection
from titan_core.toolkit.json_lines import records_of
from titan_core.toolkit.runs.files import EXCLUDED


def excluded_in(config: Config) -> dict[str, frozenset[int]]:
    """Return the indices of the documents to pass over, by dataset.

    Raises:
        UserError: the file does not exist, cannot be read, or has another line than one such as ``{"dataset": "web",
            "index": 3}``.
    """
    key, given = "data.exclude", config.section(DataSection).exclude
    path = Path(config.section(JobSection).dump_folder) / EXCLUDED if given is None else Path(given)
    if not path.is_file():
        if given is None:
            return {}
        raise UserError(config.problem(key, "no such file", "fix the path, or remove the key"))
    found: defaultdict[str, set[int]] = defaultdict(set)
    try:
        for number, record in records_of(path):
            dataset, index = record.get("dataset"), record.get("index")
            if not isinstance(dataset, str) or not isinstance(index, int) or isinstance(index, bool) or index < 0:
                fix = 'write {"dataset": NAME, "index": N} in each line, as `titan data step RUN N --json` prints them'
                raise UserError.one(f"{path}:{number}", "names no document", fix)
            found[dataset].add(index)
    except OSError as error:
        raise UserError.one(str(path), f"cannot be read: {error.strerror or error}", "fix the file") from None
    return {dataset: frozenset(indices) for dataset, indices in sorted(found.items())}
