"""Copies of a background save run on a stream of their own: in the right order, whichever stream is faster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_ckpt.save.staging import Staging
from titan_testing import PATIENCE


class Event:
    """An event of a :class:`Device`. The host may wait for it."""

    def __init__(self, device: Device) -> None:
        self.device, self.complete = device, False

    def synchronize(self) -> None:
        self.device.waits.append(threading.current_thread().name)
        assert self.device.begins.wait(PATIENCE)
        self.device.run(until=self)


class Stream:
    """Work in the order of its requests, not yet done."""

    def __init__(self, device: Device) -> None:
        self.device, self.work = device, list[Callable[[], bool]]()
        device.streams.append(self)

    def request(self, function: Callable[[], Any]) -> None:
        self.work.append(lambda: (function(), True)[1])

    def record_event(self) -> Event:
        event = Event(self.device)
        self.request(lambda: setattr(event, "complete", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.complete)


class Device:
    """Stands in for ``torch.cuda``. Does nothing until it begins and the host waits for it; then the stream ``fast`` runs as
    far as it can before the others."""

    def __init__(self, fast: int) -> None:
        self.streams: list[Stream] = []
        self.waits: list[str] = []
        self.fast = fast
        self.begins = threading.Event()
        self.training = Stream(self)
        self._current = threading.local()

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self)

    def set_device(self, device: torch.device) -> None:
        self._current.device = device

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._current, "stream", self.training)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert threading.current_thread() is threading.main_thread() or self._current.device is not None
        self._current.stream = stream
        yield
        self._current.stream = self.training

    def run(self, until: Event | None = None) -> None:
        order = [self.streams[self.fast], *(stream for stream in self.streams if stream is not self.streams[self.fast])]
        while until is None or not until.complete:
            stream = next((one for one in order if one.work and one.work[0]()), None)
            if stream is None:
                assert until is None, "the event is never complete"
                assert not any(one.work for one in self.streams), "a stream waits for ever"
                return
            stream.work.pop(0)


@pytest.fixture
def copied_late(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Make ``Tensor.copy_`` a request to the current stream of the device in the list that this returns."""
    devices: list[Device] = []
    copy = Tensor.copy_

    def request(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        devices[0].current_stream(torch.device("cuda")).request(lambda: copy(self, source))
        return self

    monkeypatch.setattr(Tensor, "copy_", request)
    return devices


@pytest.mark.parametrize("fast", [0, 1], ids=["training is faster", "copying is faster"])
def test_a_snapshot_holds_the_values_of_its_step(copied_late: list[Device], fast: int) -> None:
    device = Device(fast)
    copied_late.append(device)
    staging = Staging(torch.device("cuda"), pinned=False, cuda=device)
    weight = torch.zeros(2)
    with ThreadPoolExecutor(1, "checkpoint") as background:
        for step in (1, 2, 3):
            device.begins.clear()
            device.training.request(lambda step=step: weight.fill_(step))  # type: ignore[misc]
            copies = background.submit((snapshot := staging.snapshot({"weight": weight})).copy)
            snapshot.before_update()  # must not wait for the device, which does nothing yet
            device.training.request(lambda: weight.fill_(-1.0))  # the next update
            device.begins.set()
            assert copies.result(60)["weight"].tolist() == [step, step]
    device.run()
    assert weight.tolist() == [-1.0, -1.0]
    assert set(device.waits) == {"checkpoint_0"}


def test_a_copy_waits_for_no_later_work(copied_late: list[Device]) -> None:
    device = Device(fast=1)
    device.begins.set()
    copied_late.append(device)
    weight = torch.zeros(2)
    device.training.request(lambda: weight.fill_(1))
    snapshot = Staging(torch.device("cuda"), pinned=False, cuda=device).snapshot({"weight": weight})
    device.training.request(lambda: pytest.fail("the copy waited for this"))
    assert snapshot.copy()["weight"].tolist() == [1, 1]


def test_a_failed_copy_does_not_block_training() -> None:
    class NoMemory(Staging):
        def copy(self, tensors: Any, after: Any) -> Any:
            raise MemoryError("no memory to pin")

    snapshot = NoMemory(torch.device("cpu"), pinned=False).snapshot({"weight": torch.zeros(2)})
    with pytest.raises(MemoryError, match="no memory to pin"):
        snapshot.copy()
    snapshot.before_update()
