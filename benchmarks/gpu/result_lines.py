"""A pytest plugin that writes each result as it comes, so that a run that is stopped leaves what it has found.

Lines of JSON, in the file that the variable ``TITAN_GPU_RESULTS`` names: test, outcome (``passed``, ``failed`` or
``skipped``), seconds, and the first line of the reason.
"""

from __future__ import annotations

import json
import os

import pytest

FILE = "TITAN_GPU_RESULTS"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test, or of a setup or teardown that did not pass. Workers leave this to their parent."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else report.longreprtext
    found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    with open(os.environ[FILE], "a", encoding="utf-8") as file:
        file.write(json.dumps({**found, "reason": reason.strip().partition("\n")[0][:200]}) + "\n")
