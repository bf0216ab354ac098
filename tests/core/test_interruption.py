"""Signals: an interrupt ends a run after its step, and an application's handlers stay in place."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_core.api import PendingUpdate, hookimpl
from titan_core.loop.interruption import CLOSING, Interruption
from titan_core.loop.training import train
from titan_core.toolkit.launching import OUTCOMES
from titan_core.toolkit.worker_process import worker_processes
from titan_testing.jobs import TINY, make_job

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)


class Interrupts:
    """Presses Ctrl-C in a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    @hookimpl
    def titan_step_start(self, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_while_a_run_is_built_ends_it_at_once(in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Building:
        @hookimpl
        def titan_train_start(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(make_job("tiny", TINY), [Building()])
    assert "titan: interrupted" not in capfd.readouterr().err  # the command prints that


def test_an_application_that_handles_interrupts_keeps_its_handler(in_tmp: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert train(make_job("tiny", TINY), [Interrupts(2)]).completed
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


@pytest.fixture
def defaults() -> Iterator[None]:
    """The actions of a shell's process: pytest may run under nohup. They come back afterwards."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Receives:
    """Sends this process signals in a step."""

    def __init__(self, step: int, *numbers: signal.Signals) -> None:
        self._step, self._numbers = step, numbers

    @hookimpl
    def titan_before_update(self, update: PendingUpdate) -> None:
        if update.step == self._step:
            for number in self._numbers:
                os.kill(os.getpid(), number)


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("number", STOPS)
@pytest.mark.usefixtures("defaults")
def test_what_ends_a_process_of_a_shell_stops_a_run_after_its_step(in_tmp: Path, number: signal.Signals) -> None:
    end = train(make_job("tiny", TINY), [Receives(2, number)])
    assert (end.step, end.preempted, end.failed) == (2, True, False)
    assert end.reason == f"{number.name}: stopped after a complete step, to be resumed"


@pytest.mark.usefixtures("defaults")
def test_a_closed_terminal_sends_sighup_twice_and_logind_sigterm_too(in_tmp: Path) -> None:
    """The kernel and the shell each send SIGHUP. A limit of CPU time is announced again every second."""
    again = (signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGXCPU)
    assert train(make_job("tiny", TINY), [Receives(2, *again)]).step == 2
    os.kill(os.getpid(), signal.SIGHUP)  # while the process ends


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU])
@pytest.mark.usefixtures("defaults")
def test_signals_that_are_ignored_stay_ignored(in_tmp: Path, number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    assert train(make_job("tiny", TINY), [Receives(2, number)]).completed
    assert signal.getsignal(number) is signal.SIG_IGN


def test_sigpipe_stops_nothing(in_tmp: Path) -> None:
    assert train(make_job("tiny", TINY), [Receives(2, signal.SIGPIPE)]).completed


def test_signals_are_handled_only_inside() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Interruption() as interruption:
            assert not interruption.stop.pending
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (interruption.save.pending, interruption.stop.pending) == (True, False)
            os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.stop.pending
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)  # the second signal reaches the previous handler
            assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_of_the_launcher_ends_as_requested_however_often_sigterm_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sends it too if each process of the job has received one; its SIGKILL ends ranks that take too long."""
    monkeypatch.setenv(OUTCOMES, "outcomes")
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Interruption():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]  # nothing has stopped the rank
        with Interruption() as interruption:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.stop.pending
        os.kill(os.getpid(), signal.SIGTERM)  # while it leaves its process groups
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_while_a_run_closes_mentions_no_step(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption:
            interruption.titan_train_start()
            interruption.titan_train_end()
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == f"{CLOSING}\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_to_all_processes_of_a_job_do_not_end_its_workers() -> None:
    """Slurm's ``--signal`` sends SIGUSR1 to each process of a step, for a checkpoint."""
    with worker_processes(1) as pool:
        process = pool.submit(os.getpid).result()
        for number in (*STOPS, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process, number)
        assert pool.submit(os.getpid).result() == process
