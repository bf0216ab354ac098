"""Reading documents: retries, corrupt records, empty documents, and errors that end a job."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from typing import Any

import pytest

from harness.letters import letters, stream
from harness.loaders import close, loaders, loaders_of, plan
from titan_core.api import CorruptRecord, TextTokenizer, UserError
from titan_core.api.data.dataset import ReadPolicy
from titan_core.data.buffered_shuffle import BufferedShuffle
from titan_core.data.tokens import TokenStream
from titan_core.toolkit import reading
from titan_core.toolkit.reading import DocumentReader, is_transient


class Failing:
    """A shard whose n-th read raises the given error, once."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors, self.reads, self.next = errors, 0, 0
        self.broken = False

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> str:
        assert not self.broken, "read on after an error, without a position"
        self.reads += 1
        error = self.errors.pop(self.reads, None)
        if error is not None:
            self.broken = not isinstance(error, CorruptRecord)
            self.next += 1
            raise error
        if self.next >= 6:
            raise StopIteration
        self.next += 1
        return f"document {self.next - 1}"

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.broken = state["next"], False


def test_transient_errors_are_retried(caplog: pytest.LogCaptureFixture) -> None:
    shard = Failing({2: ConnectionResetError("peer"), 3: TimeoutError(), 6: OSError(5, "Input/output error")})
    reader = DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters")
    assert list(iter(lambda: reader.next(shard), None)) == [f"document {number}" for number in range(6)]
    assert "ConnectionResetError: peer; retrying" in caplog.text


def test_transient_errors_within_a_shuffle_buffer_are_retried() -> None:
    shard = BufferedShuffle(Failing({3: TimeoutError(), 4: TimeoutError(), 7: ConnectionResetError()}), 2, (0,))  # type: ignore[arg-type]
    reader = DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters")
    assert sorted(iter(lambda: reader.next(shard), None)) == [f"document {number}" for number in range(6)]


def test_errors_of_the_hub_client_are_transient() -> None:
    timeout = type("ReadTimeout", (type("HTTPError", (Exception,), {"__module__": "httpx2"}),), {"__module__": "elsewhere"})
    assert is_transient(timeout())
    assert not is_transient(type("Mine", (Exception,), {"__module__": "mine"})())


def test_a_killed_worker_is_one_clear_error() -> None:
    (loader,) = loaders(1, workers=1)
    others = multiprocessing.active_children()
    assert loader.next_step() is not None
    for process in multiprocessing.active_children():
        if process not in others:
            process.kill()
    with pytest.raises(UserError, match="a data worker: it ended unexpectedly"):
        list(iter(loader.next_step, None))
    close([loader])


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), ZeroDivisionError()])
def test_other_errors_are_not_transient(error: Exception) -> None:
    with pytest.raises(type(error)):
        DocumentReader(ReadPolicy(retries=2, first_wait=0.0), "letters").next(Failing({1: error}))


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_records_are_counted_and_skipped_or_end_the_job(workers: int) -> None:
    source = letters("3,!,5,!,2,9,4,4,7,7", seed=4)  # in this order, both corrupt records are among the first
    spec = stream(source, plan=plan(1, global_size=2, shards=2), on_corrupt="skip")
    (loader,) = loaders_of(spec, workers=workers)
    for _ in range(3):  # a large part of the first epoch
        step = loader.next_step()
    assert step is not None
    assert step.corrupt == 2
    (strict,) = loaders_of(stream(source, plan=plan(1, global_size=2, shards=2)), workers=workers)
    with pytest.raises(UserError, match=r"letters:[13]: no letters; .*skip such records: set data.on_corrupt"):
        list(iter(strict.next_step, None))
    close([loader], [strict])


def test_a_stream_without_tokens_is_an_error_instead_of_an_endless_loop() -> None:
    class Mute(TextTokenizer):
        vocab_size = 1

        def encode_document(self, text: str) -> list[int]:
            return []

        def decode(self, ids: object) -> str:
            return ""

    spec = letters("1,2")
    with pytest.raises(UserError, match="all 2 documents of logical shard 0 of 1 are empty"):
        TokenStream(
            spec.build.load()(spec.context), Mute(), 0, 1, "repeat", "letters", DocumentReader(ReadPolicy(), "letters")
        ).take(5)


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_documents_are_skipped_and_counted(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = loaders_of(
        stream(letters("3,0,5,0,2,9"), plan=plan(1, global_size=1, shards=1, seq_len=10)), workers=workers
    )
    seen: list[int] = []
    for _ in range(4):  # more than an epoch of 27 tokens, less than two
        step = loader.next_step()
        assert step is not None
        seen += step.microbatches[0].tokens[0].tolist()
    loader.close()
    assert (256, 257) not in set(itertools.pairwise(seen))
    assert 2 <= step.empty <= 4
    if not workers:  # worker processes have their own logs
        assert "dataset 'letters': skipping documents without text; 1 so far" in caplog.text


class Broken:
    """Fails ``times`` times before each document."""

    def __init__(self, times: int) -> None:
        self.times, self.failed = times, 0

    def __next__(self) -> str:
        if self.failed < self.times:
            self.failed += 1
            raise OSError("the network is away")
        return "text"

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(("times", "waits"), [(0, []), (1, [3.0]), (3, [3.0, 6.0, 12.0]), (4, None)])
def test_retry_delays_double_and_retries_are_limited(times: int, waits: list[float] | None) -> None:
    reader = DocumentReader(ReadPolicy(retries=3, first_wait=3.0), "d")
    waited: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    reader.stopped = Stopped()
    if waits is None:
        with pytest.raises(UserError, match="cannot be read after 3 retries: OSError: the network is away"):
            reader.next(Broken(times))  # type: ignore[arg-type]
        assert waited == [3.0, 6.0, 12.0]
    else:
        assert reader.next(Broken(times)) == "text"  # type: ignore[arg-type]
        assert waited == waits


def test_retry_delays_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    reader = DocumentReader(ReadPolicy(retries=20, first_wait=3600.0 * 24 * 30), "d")
    monkeypatch.setattr(reader.stopped, "wait", waits.append)
    with pytest.raises(UserError, match="after 20 retries"):
        reader.next(Broken(21))  # type: ignore[arg-type]
    assert waits == [reading.LONGEST_WAIT] * 20
