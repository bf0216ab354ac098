"""The lifecycle hooks: observers' state, misspelt hooks, failing observers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from titan_core.api import hookimpl
from titan_core.loop.training import train
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.hookspecs import JobFact
from titan_testing.jobs import TINY, JobRecorder, make_job


class Keeps:
    """An observer or a metric logger with state."""

    def __init__(self, state: Any) -> None:
        self.state, self.restored = state, None

    @hookimpl
    def titan_save_state(self) -> Any:
        return self.state

    @hookimpl
    def titan_restore_state(self, state: Any) -> None:
        self.restored = state.get("mine")


@pytest.mark.parametrize("state", [{"mine": torch.ones(1)}, ["mine"], {"mine": {1: 2}}, {"mine": (1, 2)}], ids=str)
def test_state_that_cannot_be_saved_is_reported_with_its_observer(state: Any) -> None:
    with pytest.raises(ValueError, match=r"Keeps .*: titan_save_state returned .* must return a dict of plain values"):
        Lifecycle([Keeps(state)]).save_state()


def stating(answer: Any) -> object:
    class States:
        @hookimpl
        def titan_job_facts(self, job: Any) -> Any:
            return answer

    return States()


def test_the_facts_of_a_job_are_those_of_all_plugins() -> None:
    first, second = JobFact("memory", "1 GiB", {"gib": 1}), JobFact("cost", "much", 9)
    lifecycle = Lifecycle([stating([first]), stating(None), stating([second])])
    assert {fact.name: fact for fact in lifecycle.job_facts(make_job("tiny"))} == {"memory": first, "cost": second}
    with pytest.raises(ValueError, match=r"titan_job_facts returned .* must return a list of JobFact"):
        Lifecycle([stating([("memory", "1 GiB")])]).job_facts(make_job("tiny"))


def test_an_observer_with_a_misspelt_hook_is_refused() -> None:
    class Observer:
        @hookimpl
        def titan_step_over(self) -> None:
            pass

    with pytest.raises(ValueError, match="titan_step_over"):
        Lifecycle([Observer()])


def test_an_observer_with_a_wrong_argument_or_an_unmarked_hook_is_refused() -> None:
    class Asks:
        @hookimpl
        def titan_step_end(self, step: int) -> None:
            pass

    class Forgets:
        def titan_step_end(self, report: Any) -> None:
            pass

    with pytest.raises(ValueError, match=r"Plugin Asks for hook 'titan_step_end' .* Argument\(s\) \{'step'\} are declared"):
        Lifecycle([Asks()])
    with pytest.raises(ValueError, match=r"Forgets\.titan_step_end is not marked with @hookimpl: it would never be called"):
        Lifecycle([Forgets()])


def test_an_observer_that_fails_hides_neither_the_error_nor_others(in_tmp: Path) -> None:
    class Breaks:
        @hookimpl(tryfirst=True)
        def titan_step_end(self) -> None:
            raise ValueError("the original")

        @hookimpl(tryfirst=True)
        def titan_train_end(self) -> None:
            raise RuntimeError("another")

    recorder = JobRecorder(weights=False)
    with pytest.raises(ValueError, match="the original"):
        train(make_job("tiny", TINY), [Breaks(), recorder])
    assert recorder.record.events[-2:] == ["exception ValueError", "train_end"]


class KeepsTensors:
    """An observer with tensors."""

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    @hookimpl
    def titan_state_tensors(self) -> Any:
        return self.tensors


def test_tensors_of_observers_are_merged() -> None:
    first, second = torch.ones(1), torch.zeros(2)
    lifecycle = Lifecycle([KeepsTensors({"a": first}), KeepsTensors(None), KeepsTensors({"b": second})])
    assert lifecycle.state_tensors() == {"a": first, "b": second}
    with pytest.raises(ValueError, match=r"KeepsTensors .* implements titan_state_tensors, but exists on rank 0 only"):
        lifecycle.register(KeepsTensors({}), has_tensors=False)
    with pytest.raises(ValueError, match="titan_state_tensors returned 'a', which is already in use: names must be unique"):
        Lifecycle([KeepsTensors({"a": first}), KeepsTensors({"a": first})]).state_tensors()


@pytest.mark.parametrize("tensors", [{"mine": 1.0}, ["mine"], {1: torch.ones(1)}], ids=str)
def test_invalid_tensors_are_refused_with_their_observer(tensors: Any) -> None:
    with pytest.raises(
        ValueError, match=r"KeepsTensors .*: titan_state_tensors returned .* must return a mapping from names to tensors"
    ):
        Lifecycle([KeepsTensors(tensors)]).state_tensors()


class Counts:
    """An observer that returns figures."""

    def __init__(self, figures: Any) -> None:
        self.figures = figures

    @hookimpl
    def titan_figures(self) -> Any:
        return self.figures


def test_figures_of_observers_are_merged() -> None:
    assert Lifecycle([Counts({"a": 1}), Counts(None), Counts({"b": None})]).figures({"step": 1}) == {"a": 1, "b": None}
    assert Lifecycle().figures({"step": 1}) == {}


@pytest.mark.parametrize("figures", [["a"], 3.0, {"a": "text"}, {"step": 2}, {1: 2}], ids=str)
def test_invalid_figures_are_refused_with_their_observer(figures: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Counts .*(must return a mapping from names to numbers|titan_figures returned 'step')"
    ):
        Lifecycle([Counts(figures)]).figures({"step": 1})
