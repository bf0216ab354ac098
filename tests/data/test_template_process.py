"""The process that renders templates: one for a process, which starts late, is replaced when it is stopped, and never
outlives the process that asks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from titan_core.api import CorruptRecord, UserError
from titan_data import template_process
from titan_data.records import RecordTemplate
from titan_data.template_process import Renderer, SandboxedTemplate, TemplateRefused, TemplateStopped
from titan_testing import PATIENCE

ENDLESS = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}{{ text }}"


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Renderer]:
    found = Renderer(cpu_seconds=0.3)
    monkeypatch.setattr(template_process, "renderer", found)
    yield found
    found.end()


def text_of(source: str, **record: Any) -> str:
    return RecordTemplate(source, "data.format").text(record, "data.jsonl:7")


def wait_for_end(process: int) -> None:
    status, deadline = Path(f"/proc/{process}/stat"), time.monotonic() + PATIENCE
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":  # Z: nobody has waited for it yet
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_template_that_takes_too_long_is_one_error_and_the_next_one_is_rendered(renderer: Renderer) -> None:
    template = RecordTemplate(ENDLESS, "data.format")
    with pytest.raises(TemplateStopped) as caught:
        template.text({"text": "a"}, "data.jsonl:7")
    assert str(caught.value) == (
        "data.jsonl:7: data.format: the template is stopped: it takes more than 0.3 s of CPU time; simplify the template, "
        "or remove the record"
    )
    assert text_of("{{ text }}", text="b") == "b"


def test_a_slow_machine_is_no_reason_to_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Renderer(cpu_seconds=100, seconds=0.3)
    monkeypatch.setattr(template_process, "renderer", slow)
    with pytest.raises(TemplateStopped, match=r"takes more than 0\.3 s;"):
        text_of(ENDLESS, text="a")
    slow.end()


def test_memory_is_freed_by_another_process(renderer: Renderer) -> None:
    assert text_of("{{ text }}", text="a") == "a"
    first = renderer.process_id
    with pytest.raises(TemplateStopped, match="takes more than 768 MiB of memory"):
        text_of("{{ text.ljust(10 ** 10) }}", text="a")
    assert text_of("{{ text }}", text="a") == "a"
    assert renderer.process_id not in (None, first)


def test_memory_of_an_answer_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON writes a control character as six."""
    small = Renderer(memory=100 << 20)
    monkeypatch.setattr(template_process, "renderer", small)
    with pytest.raises(TemplateStopped, match="takes more than 100 MiB of memory"):
        text_of("{{ text * 19000000 }}", text="\x01")
    small.end()


def test_a_text_that_is_too_long_is_a_corrupt_record(renderer: Renderer) -> None:
    with pytest.raises(CorruptRecord, match="writes more than 20,000,000 characters"):
        text_of("{{ text * 20000001 }}", text="a")
    assert text_of("{{ text * 3 }}", text="a") == "aaa"


def test_a_process_that_somebody_killed_is_replaced(renderer: Renderer) -> None:
    assert text_of("{{ text }}", text="a") == "a"
    assert renderer.process_id is not None
    os.kill(renderer.process_id, signal.SIGTERM)  # ignored: the parent decides
    assert text_of("{{ text }}", text="b") == "b"
    first = renderer.process_id
    os.kill(first, signal.SIGKILL)
    wait_for_end(first)
    assert text_of("{{ text }}", text="c") == "c"


@pytest.mark.parametrize("when", ["starting", "later"])
def test_signals_to_the_group_are_for_its_parent(renderer: Renderer, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal or a scheduler sends them to all processes of a job, also while one of them starts."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **named))
        if when == "starting":
            send(started[-1])
        return started[-1]

    def send(process: subprocess.Popen[bytes]) -> None:
        for name in ("INT", "TERM", "HUP", "QUIT", "XCPU", "USR1", "USR2"):
            process.send_signal(signal.Signals[f"SIG{name}"])

    start, mask = subprocess.Popen, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert text_of("{{ text }}", text="a") == "a"
    send(started[0])
    assert text_of("{{ text }}", text="b") == "b"
    assert [process.pid for process in started] == [renderer.process_id]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no prlimit")
def test_a_limit_of_cpu_time_of_the_job_ends_it(renderer: Renderer) -> None:
    """The kernel ends a process at the hard limit. At the soft one it sends SIGXCPU, which is for the parent."""
    process = renderer._started()
    with process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (0, 0))
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_ends_before_it_reads_a_request_is_one_error(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = RecordTemplate("{{ text }}", "data.format")
    assert renderer.process_id is not None
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda process: None)  # it ran a moment ago
        os.kill(renderer.process_id, signal.SIGKILL)
        wait_for_end(renderer.process_id)
        with pytest.raises(TemplateStopped, match="its process ended with status -9"):
            template.text({"text": "a"}, "data.jsonl:7")
    assert template.text({"text": "b"}, "data.jsonl:8") == "b"


def test_threads_share_a_process(renderer: Renderer) -> None:
    wrong: list[int] = []

    def render(number: int) -> None:
        template = RecordTemplate(f"{number}: {{{{ text }}}}", "data.format")
        wrong.extend(n for n in range(50) if template.text({"text": n}, "here") != f"{number}: {n}")

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_has_a_process_of_its_own(renderer: Renderer) -> None:
    assert text_of("{{ text }}", text="a") == "a"
    first, child = renderer.process_id, os.fork()
    if child == 0:
        right = text_of("{{ text }}", text="b") == "b" and renderer.process_id != first
        renderer.end()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert text_of("{{ text }}", text="a") == "a"
    assert renderer.process_id == first


@pytest.mark.parametrize("source", ["{{ text }}", ENDLESS], ids=["waiting", "rendering"])
def test_it_ends_with_its_parent(source: str) -> None:
    """Also if the parent is killed, while it waits for a template that never ends."""
    script = (
        "import os, sys, threading\n"
        "from titan_data import template_process\n"
        "from titan_data.records import RecordTemplate\n"
        "template_process.renderer = found = template_process.Renderer(cpu_seconds=0.5)\n"
        "template = RecordTemplate(sys.argv[1], 'data.format')\n"
        "print(found.process_id, flush=True)\n"
        "template.text({'text': 'a'}, 'here')\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(child)


def test_it_imports_nothing_large_and_nothing_from_the_current_folder(in_tmp: Path, renderer: Renderer) -> None:
    (in_tmp / "jinja2.py").write_text("raise SystemExit('the current folder')")
    (in_tmp / "json.py").write_text("raise SystemExit('the current folder')")
    assert text_of("{{ text }}", text="a") == "a"
    code = "import sys, titan_data.template_worker; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "titan_core", "tokenizers", "pydantic", "datasets"} & set(found)
    assert {"jinja2", "titan_data"} <= set(found)


VALUES: dict[str, tuple[str, Any, str]] = {
    # template, value of the field, text
    "a date": ("{{ x.year }} {{ x | string }}", date(2024, 2, 29), "2024 2024-02-29"),
    "a time stamp": (
        "{{ x.strftime('%H:%M %z') }}",
        datetime(2024, 1, 1, 5, 6, tzinfo=timezone(timedelta(hours=2))),
        "05:06 +0200",
    ),
    "a duration": ("{{ x.total_seconds() }}", timedelta(days=-1, microseconds=1), "-86399.999999"),
    "a decimal": ("{{ (x * 2) | string }}", Decimal("12.50"), "25.00"),
    "bytes": ("{{ x.decode() }}", "é".encode(), "é"),
    "a UUID": ("{{ x.hex }}", UUID(int=7), "00000000000000000000000000000007"),
    "inside a list": ("{{ x[0].when.day }}", [{"when": date(2024, 2, 29)}], "29"),
    "a number without an end": ("{{ x }}", float("inf"), "inf"),
    "a long number": ("{{ x }}", 10**400 + 1, str(10**400 + 1)),
    "a lone surrogate": ("{{ x }}", "\ud83d", "\ud83d"),
    "no character": ("{{ x | length }}", "\x00\ue000", "2"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive_as_they_are(name: str) -> None:
    source, value, text = VALUES[name]
    assert text_of(source, x=value) == text


def test_a_field_that_is_not_read_is_not_sent() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    assert text_of("{{ text }}", text="a", deep=deep, other=object()) == "a"
    with pytest.raises(CorruptRecord, match="recursion"):
        text_of("{{ deep }}", text="a", deep=deep)
    with pytest.raises(CorruptRecord, match="a template reads no value of the type object"):
        text_of("{{ record.text }}", text="a", other=object())


@pytest.mark.parametrize("source", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_nothing_makes_a_rendering_random(source: str) -> None:
    with pytest.raises((TemplateRefused, UserError)):
        SandboxedTemplate("chat", source, "chat_template.jinja").render(
            {"messages": [], "now": "2024-01-01", "prefixes": []}
        )
