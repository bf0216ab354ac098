"""What plugins say about a failed job; a plugin that fails there hides nothing."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from titan_core.api import hookimpl
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.plugins.guard import Origin
from titan_launch.launch import _diagnose


def job_with(*answers: Any) -> AssembledJob:
    """Return a job of plugins that return ``answers``, or raise them."""

    def plugin(number: int, answer: Any) -> tuple[ModuleType, Origin]:
        module: Any = ModuleType(f"plugin_{number}")

        def titan_diagnose(run: str) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        module.titan_diagnose = hookimpl(titan_diagnose)
        return module, Origin(f"plugin_{number}", f"titan-{number}", "1")

    modules = [plugin(number, answer) for number, answer in enumerate(answers)]
    return cast(AssembledJob, SimpleNamespace(registry=SimpleNamespace(modules=lambda: modules), dump_folder="run"))


def test_the_first_explanation_is_returned() -> None:
    assert _diagnose(job_with(None, "rank 1 hangs", None), 0.0) == "rank 1 hangs"
    assert _diagnose(job_with(), 0.0) is None


FAILURES = {"raised KeyError: 'x'": KeyError("x"), "raised SystemExit: 3": SystemExit(3)}


@pytest.mark.parametrize("why", FAILURES)
def test_a_plugin_that_fails_is_named(why: str, caplog: pytest.LogCaptureFixture) -> None:
    assert _diagnose(job_with(FAILURES[why]), 0.0) is None
    assert f"plugin 'plugin_0' (titan-0 1): titan_diagnose {why}" in caplog.text
