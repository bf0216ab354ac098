"""Renders templates of strangers in a process of its own, which :mod:`titan_data.template_process` starts, and which the
kernel ends if a rendering takes too long. Imports jinja2 and nothing large.

A request on the standard input (:mod:`titan_data.template_messages`) has a template as ``[language, source, constants]`` and
values, or ``null`` to read the template only. The answer on the standard output is an object.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, UndefinedError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from titan_data.template_messages import ANSWER, REQUEST, decode

LARGEST = 20_000_000
"""Most characters that a template may write."""
_START, _END = "\ue000\ue001", "\ue001\ue000"
"""Mark what the assistant wrote in a rendered text, and are removed from it: characters of Unicode's private area."""
_KINDS = {type(None): "null", bool: "a boolean", list: "an array", dict: "an object"}


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, by which a template says what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares an attribute of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        """Put marks around the text of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked", []), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_END}"


class _Namespace(Namespace):
    """As in ``transformers``, a namespace has no names that begin with an underscore."""

    def __init__(*arguments: Any, **named: Any) -> None:
        values = dict(*arguments[1:], **named)
        for name in values:
            _require_public(name)
        Namespace.__init__(arguments[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


class _Dict:
    """The type ``dict`` without its attributes, as in ``transformers``."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} is no name in a namespace")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _part(value: Any) -> Any:
    """Return what ``{{ value }}`` becomes a part of the text. ``null`` would silently become the word "None"."""
    if isinstance(value, str | int | float | Undefined) and not isinstance(value, bool):
        return value
    kind = _KINDS.get(type(value), f"a {type(value).__name__}")
    raise TemplateError(f"a value between braces is {kind}, not text; name one of its parts, or use | tojson")


def _num_shared(text: str, prefix: str) -> int:
    """Return a number of characters with which both begin. The rest of ``prefix`` may be twice as long as it has to be."""
    rest = 0
    while not text.startswith(prefix[: len(prefix) - rest]):
        rest = min(2 * rest + 1, len(prefix))
    return len(prefix) - rest


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(value, StrictUndefined):
        str(value)  # raises UndefinedError
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Language:
    """A template in one of two languages: ``record`` reads the fields of a record, and has no functions; ``chat`` is that of
    ``transformers``. Neither has what makes a rendering random."""

    def __init__(self, language: str, source: str, constants: dict[str, Any]) -> None:
        self._chat, self._constants = language == "chat", constants
        if self._chat:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
            )
            environment.globals |= {"raise_exception": _refuse, "dict": _Dict(), "namespace": _Namespace}
            del environment.globals["lipsum"]
        else:
            environment = ImmutableSandboxedEnvironment(
                undefined=StrictUndefined, keep_trailing_newline=True, finalize=_part
            )
            environment.globals.clear()
        environment.filters["tojson"] = _json
        del environment.filters["random"]
        tree = environment.parse(source)
        self.names = sorted(meta.find_undeclared_variables(tree))
        """Variables that the template reads."""
        self._marks = tree.find(nodes.ExtensionAttribute) is not None
        self._template: Template = environment.from_string(tree)

    def render(self, encoded: bytes, values: dict[str, Any]) -> dict[str, Any]:
        """Return the text, the ranges of it that the assistant writes, and prefixes of the chat, as many as half of the time
        that is left suffices for: how much of the text each begins with, and the rest of it."""
        if not self._chat:
            return {"text": self._text({"record": values, **values} if "record" in self.names else values)}
        if self._marks and any(json.dumps(mark)[1:-1].encode() in encoded for mark in (_START, _END)):
            raise TemplateError(f"a message contains {_START!a} or {_END!a}, which mark the assistant's part of a chat here")
        now, prefixes = datetime.fromisoformat(values.pop("now")), values.pop("prefixes")
        known = {"documents": None, "strftime_now": lambda form: now.strftime(form), **self._constants, **values}
        first, *pieces = self._text(known).split(_START)
        text, ranges = first, []
        for piece in pieces:
            inner, _, after = piece.partition(_END)
            ranges.append((len(text), len(text) + len(inner)))
            text += inner + after
        if self._marks:
            return {"text": text, "assistant": ranges, "prefixes": []}
        messages, size, left = values["messages"], 0, signal.getitimer(signal.ITIMER_PROF)[0]
        whole = len(messages), values["add_generation_prompt"]
        found: list[tuple[int, str]] = []
        for number, prompt in prefixes:
            if found and (size > LARGEST or signal.getitimer(signal.ITIMER_PROF)[0] < left / 2):
                break
            own = {"messages": messages[:number], "add_generation_prompt": prompt}
            prefix = text if (number, prompt) == whole else self._text({**known, **own})
            shared = _num_shared(text, prefix)
            found.append((shared, prefix[shared:]))
            size += len(prefix) - shared
        return {"text": text, "assistant": None, "prefixes": found}

    def _text(self, values: dict[str, Any]) -> str:
        text = self._template.render(values)
        if len(text) > LARGEST:
            raise TemplateError(f"it writes more than {LARGEST:,} characters")
        return text


@functools.lru_cache(maxsize=16)
def _read(template: bytes) -> _Language:
    return _Language(*json.loads(template))


def _answer(template: bytes, encoded: bytes, typed: bool) -> bytes:
    found: dict[str, Any]
    try:
        language = _read(template)
        values = decode(encoded, typed)
        return json.dumps({"names": language.names} if values is None else language.render(encoded, values)).encode()
    except MemoryError:
        found = {"stopped": "memory"}
    except UndefinedError as error:
        found = {"undefined": str(error.message)[:2000]}
    except RecursionError:
        found = {"refused": "it calls itself without an end, or is nested too deep"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        found = {"refused": str(error)[:2000] or type(error).__name__}
    return json.dumps(found).encode()


def main(cpu_seconds: float, seconds: float, memory: int) -> None:
    """Answer requests until the standard input ends.

    Args:
        cpu_seconds: CPU time that an answer may take.
        seconds: time that an answer may take.
        memory: bytes of memory that answers may take, on Linux.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while head := sys.stdin.buffer.read(REQUEST.size):
        template, values, typed = REQUEST.unpack(head)
        request = sys.stdin.buffer.read(template), sys.stdin.buffer.read(values)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the signals end the process, whatever it is doing
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = _answer(*request, typed)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(ANSWER.pack(len(answer)))
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
