"""Observers that break their contract are reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import hookimpl
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import TINY, run_recipe


class Answers:
    """Decides whether to skip an update."""

    def __init__(self, answer: Callable[[int], object]) -> None:
        self.answer, self.rank = answer, 0

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        self.rank = run.world.rank

    @hookimpl
    def titan_before_update(self, update: Any) -> object:
        return self.answer(self.rank) if update.step == 2 else None


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("answer", [1, 0.0, "no", []])
def test_an_answer_that_is_neither_bool_nor_none(in_tmp: Path, answer: object) -> None:
    with pytest.raises(ValueError, match=r"Answers .*: titan_before_update returned .*; it must return a bool, a 0-d"):
        run_recipe("tiny", TINY, observers=[Answers(lambda rank: answer)])


def skips_on(ranks: tuple[int, ...]) -> Callable[[int], bool]:
    return lambda rank: rank in ranks


def skipped(folder: str, ranks: tuple[int, ...]) -> str:
    os.chdir(folder)
    try:
        return run_recipe("tiny", TINY, observers=[Answers(skips_on(ranks))]).reason
    except RuntimeError as error:
        return str(error)


def test_an_update_that_only_some_ranks_skip(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, skipped, str(tmp_path), (0, 1)) == ["all steps are done"] * 2
    for reason in gloo.run(2, skipped, str(tmp_path), (1,)):
        assert reason.startswith("1 of 2 ranks skipped the update of an earlier step")


def test_an_observer_that_loses_gradients(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Loses:
        @hookimpl
        def titan_train_start(self, run: Any) -> None:
            self.parameters = list(run.parts[0].module.parameters())

        @hookimpl
        def titan_before_update(self, update: Any) -> None:
            if update.step == 3:
                for parameter in self.parameters:
                    parameter.grad = None

    run_recipe("tiny", TINY, observers=[Loses()])
    assert "step 3: 21 of 21 parameters received no gradient" in caplog.text
