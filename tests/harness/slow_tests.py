"""Tests that take long are marked ``full`` and ``slow``: those of ``tests/slow.txt``, a line each, which one command writes.

    uv run pytest -m "not full or slow" --write-slow 0.5    # on a quiet machine

lists the tests of this run that take longer than half a second, but not the fastest test of a file, so that each file has a
quick one. Lines of tests that did not run stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "slow.txt"


def mark_slow(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the listed tests.

    Raises:
        pytest.UsageError: a listed test does not exist, as far as that is known: its file was collected whole, or is gone.
    """
    listed = set(LIST.read_text().splitlines())
    names = {item.nodeid: item for item in items}
    for name in listed & names.keys():
        names[name].add_marker("full")
        names[name].add_marker("slow")
    if any("::" in argument for argument in config.args):
        return  # only some tests of a file have been collected
    files = {name.partition("::")[0] for name in names}

    def is_known(name: str) -> bool:
        file = name.partition("::")[0]
        return file not in files and (config.rootpath / file).exists()

    if gone := sorted(name for name in listed - names.keys() if not is_known(name)):
        raise pytest.UsageError(f"{LIST.name} lists {gone[0]!r}, which is no test: remove the line, or correct the name")


class SlowTests:
    """A plugin of pytest that writes the list."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._taken: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            self._taken[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        LIST.write_text("".join(f"{name}\n" for name in sorted(self._listed())))

    def _listed(self) -> set[str]:
        others = set(LIST.read_text().splitlines()) - self._taken.keys()
        fastest: dict[str, str] = {}
        for name in sorted(self._taken, key=self._taken.__getitem__):
            fastest.setdefault(name.partition("::")[0], name)
        slow = {name for name, seconds in self._taken.items() if seconds > self._seconds}
        return others | slow - set(fastest.values())
