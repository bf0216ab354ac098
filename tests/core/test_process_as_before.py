"""A job leaves its process as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from titan_core.api import hookimpl
from titan_core.loop.gc_settings import free_job, gc_as_before
from titan_testing.jobs import TINY, run_recipe

SETTINGS: dict[str, object] = {
    **TINY,
    "training.steps": 1,
    "training.deterministic": "true",
    "training.float32_matmul_precision": "medium",
}


class Freezing:
    """An observer that does to the collector what titan-launch's does, and raises in a hook."""

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in
        self.deterministic = False

    @hookimpl
    def titan_train_start(self) -> None:
        gc.disable()
        gc.freeze()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self._fail("start")

    @hookimpl
    def titan_step_end(self) -> None:
        self._fail("step")

    @hookimpl
    def titan_train_end(self) -> None:
        self._fail("end")

    def _fail(self, hook: str) -> None:
        if hook == self._fails_in:
            raise KeyError(hook)


def state() -> tuple[Any, ...]:
    return (
        gc.isenabled(),
        gc.get_freeze_count(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("fails_in", ["nothing", "start", "step", "end"])
def test_the_state_of_the_process_is_as_before(fails_in: str, in_tmp: Path) -> None:
    before, observer = state(), Freezing(fails_in)
    if fails_in == "nothing":
        run_recipe("tiny", SETTINGS, observers=[observer])
    else:
        with pytest.raises(Exception, match=fails_in):
            run_recipe("tiny", SETTINGS, observers=[observer])
    assert observer.deterministic
    assert state() == before


def test_what_was_frozen_before_stays_frozen() -> None:
    try:
        with gc_as_before():
            gc.freeze()
        assert gc.get_freeze_count() == 0
        gc.freeze()
        with gc_as_before():
            gc.disable()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


class Cycle:
    """Garbage that only a collection frees. It refers to ``held`` as C++ does, unseen by the collector."""

    alive: ClassVar[dict[str, Cycle]] = {}

    def __init__(self, held: str) -> None:
        self.itself, self._held = self, held

    def __del__(self) -> None:
        self.alive.pop(self._held, None)


@pytest.mark.parametrize(("free", "freed"), [(gc.collect, False), (free_job, True)], ids=["one collection", "free_job"])
def test_what_cycles_hold_in_cycles_is_freed(free: Callable[[], object], freed: bool) -> None:
    Cycle.alive["inner"] = Cycle("")
    inner = weakref.ref(Cycle.alive["inner"])
    Cycle("inner")
    free()
    assert (inner() is None) is freed
