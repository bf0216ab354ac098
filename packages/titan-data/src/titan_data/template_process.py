"""Templates of strangers, in recipes and beside tokenizers. They run in a process (:mod:`titan_data.template_worker`) with a
limit of time and memory. One starts with the first template of this process, and ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from titan_core.api import UserError
from titan_core.toolkit.processes import python
from titan_data.template_messages import ANSWER, REQUEST, encode

CPU_SECONDS: Final = 10.0
"""CPU time that a rendering may take."""
SECONDS: Final = 25.0
"""Time that a rendering may take."""
MEMORY: Final = 3 << 28
"""Bytes of memory that renderings may take, on Linux."""
_LONGEST_ANSWER: Final = 1 << 28
_OF_PARENT: Final = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
"""Signals that terminals and schedulers send to the whole group, and that the parent handles."""


class TemplateRefused(Exception):
    """A text is not a template, or a template refuses its values."""


class UndefinedName(TemplateRefused):
    """The values lack a name that the template reads."""


class TemplateStopped(UserError):
    """A template takes too much time or memory. Its other records are not tried."""


class Renderer:
    """A process that renders templates, started when it is first asked."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._limits = cpu_seconds, seconds, memory
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def process_id(self) -> int | None:
        """The id of the process, if it has started."""
        return None if self._process is None else self._process.pid

    def ask(self, template: bytes, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            TypeError, ValueError, RecursionError: the values cannot be sent.
        """
        encoded, typed = encode(values)
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            try:
                head = REQUEST.pack(len(template), len(encoded), typed)
                answer = _exchange(self._process, head + template + encoded)
            except (OSError, EOFError):
                return {"stopped": self._why_ended()}
            except BaseException:  # an interrupt in the middle of an answer
                self._end()
                raise
            if "stopped" in answer:
                self._end()  # with the memory that it took
                return {"stopped": f"it takes more than {self._limits[2] >> 20} MiB of memory"}
            return answer

    def end(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        limits = map(str, self._limits)
        own = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_PARENT)  # the process inherits it, and keeps it
        try:
            return subprocess.Popen(
                python("-m", "titan_data.template_worker", *limits), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, own)

    def _why_ended(self) -> str:
        cpu_seconds, seconds, _ = self._limits
        status = self._end()
        if status == -signal.SIGPROF:
            return f"it takes more than {cpu_seconds:g} s of CPU time"
        if status == -signal.SIGALRM:
            return f"it takes more than {seconds:g} s"
        return f"its process ended with status {status} (killed, or out of memory?)"

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(BrokenPipeError), process:  # closes the pipes, one of which may hold half of a request, and waits
            process.kill()
        return process.returncode


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    head = process.stdout.read(ANSWER.size)
    size = ANSWER.unpack(head)[0] if len(head) == ANSWER.size else _LONGEST_ANSWER
    if size >= _LONGEST_ANSWER or len(answer := process.stdout.read(size)) < size:
        raise EOFError
    found: dict[str, Any] = json.loads(answer)
    return found


renderer = Renderer()
"""The one of this process."""


class SandboxedTemplate:
    """A template that runs in :data:`renderer`, in one of its two languages."""

    def __init__(
        self, language: Literal["record", "chat"], source: str, where: str, constants: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            where: where ``source`` is, for errors.
            constants: values of each rendering.

        Raises:
            TemplateRefused: it is not a template.
            TemplateStopped: reading it takes too long, or too much memory.
        """
        self._encoded, self._where = json.dumps([language, source, dict(constants or {})]).encode(), where
        self.names = frozenset(self.render(None)["names"])
        """Variables that it reads."""

    def render(self, values: Mapping[str, Any] | None, place: str = "") -> dict[str, Any]:
        """Return the text, and for a chat the ranges that the assistant writes.

        Args:
            place: where the values come from, for errors.

        Raises:
            TemplateRefused: it refuses the values, or they are not plain.
            TemplateStopped: it takes too long, or too much memory.
        """
        try:
            answer = renderer.ask(self._encoded, values)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(str(error)) from None
        if why := answer.get("stopped"):
            where, fix = f"{place}: {self._where}" if place else self._where, "simplify the template, or remove the record"
            raise TemplateStopped.one(where, f"the template is stopped: {why}", fix)
        if "undefined" in answer:
            raise UndefinedName(answer["undefined"])
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return answer
