"""Templates of strangers, in recipes and beside tokenizers: jinja2's sandbox, in which a template runs no code, with
bounds on its time and memory."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from typing import Any

from jinja2 import Environment, Template, TemplateError, Undefined, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = 200_000_000
"""Work that one rendering may do, some seconds: the characters that it reads and makes, :data:`_ELEMENT` for each element
of a list, and :data:`_STEP` for each pass of a loop and each call."""
LARGEST = 20_000_000
"""Most characters or elements of one value."""
_STEP = 2000
_ELEMENT = 20
"""Work of an element of a list, relative to that of a character."""
_MOST_BITS = 10_000
"""Most bits of a number."""
_MULTIPLY = frozenset((
    "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "slice",
    "tojson", "translate", "urlize", "wordwrap", "xmlattr", "zfill",
))  # fmt: skip
"""Filters and methods whose result may be as long as the product of what they take. Their sizes are checked before."""
_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")
"""A width in a format string."""

_left: ContextVar[list[int]] = ContextVar("left")


class TooMuch(TemplateError):
    """The template would take too long, or too much memory."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, which also bounds what a template can take. Parse with :meth:`read`, render with :meth:`text`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters |= {"_steps": _steps, "_part": _part}
        del self.globals["lipsum"]  # makes texts of any length

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Provide ``function`` as filter ``name``, bounded as all others."""

        @functools.wraps(function)  # with the mark by which a filter receives the context
        def bounded(*arguments: Any, **named: Any) -> Any:
            return _called(name, function, arguments, named)

        self.filters[name] = bounded

    def read(self, source: str) -> Template:
        """Return the template of ``source``.

        Raises:
            TemplateError: it is none, or has a recursive loop.
        """
        try:
            tree = self.parse(source)
            for loop in tree.find_all(nodes.For):
                if loop.recursive:
                    raise TemplateError(f"line {loop.lineno}: a recursive loop has no bound")
                loop.iter = nodes.Filter(loop.iter, "_steps", [], [], None, None, lineno=loop.lineno)
            for joined in tree.find_all(nodes.Concat):
                joined.nodes = [
                    nodes.Filter(part, "_part", [], [], None, None, lineno=joined.lineno) for part in joined.nodes
                ]
            return self.from_string(tree)
        except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise TemplateError(f"it is too complex: {error}") from None

    @staticmethod
    def text(template: Template, values: Mapping[str, Any]) -> str:
        """Render ``template``.

        Raises:
            TooMuch: it takes too long, or makes a text that is too long.
            Exception: whatever an operation of the template raises.
        """
        token = _left.set([BUDGET])
        try:
            pieces, size = [], 0
            for piece in template.generate(values):
                size += len(piece)
                _require(size)
                _spend(len(piece))
                pieces.append(piece)
            return "".join(pieces)
        except RecursionError:
            raise TooMuch("it calls itself without an end") from None
        finally:
            _left.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See :meth:`jinja2.sandbox.SandboxedEnvironment.call_binop`."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_number(left.bit_length() * max(right, 0))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _require_number(left.bit_length() + right.bit_length())
        elif operator == "*":
            _require(_size(left) * _size(right))
        elif operator == "%" and isinstance(left, str):
            _require_format(left)
        result = super().call_binop(context, operator, left, right)
        _spend(_work(left) + _work(result))
        return result

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:
        """See :meth:`jinja2.sandbox.SandboxedEnvironment.call`."""
        function = functools.partial(ImmutableSandboxedEnvironment.call, __self, __context, __obj)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps ``str.format``
        return _called(getattr(__obj, "__name__", ""), function, arguments, named, owner)


def _called(
    name: str, function: Callable[..., Any], arguments: Iterable[Any], named: Mapping[str, Any], owner: Any = None
) -> Any:
    values = [value for value in (owner, *arguments, *named.values()) if not isinstance(value, Environment | Context)]
    if name in _MULTIPLY:
        if name.startswith("format"):
            for text in values:
                if isinstance(text, str):
                    _require_format(text)
        sizes = sorted((_size(value) for value in values), reverse=True)
        _require(math.prod(sizes[:2]))
    _spend(_STEP + sum(map(_work, values)))
    result = function(*arguments, **named)
    if isinstance(result, str | list | tuple | dict):
        _require(len(result))
        _spend(_work(result))
    return result


def _steps(values: Any) -> Iterator[Any]:
    """Yield from ``values``, and count each pass of the loop."""
    for value in values:
        _spend(_STEP)
        yield value


def _part(value: Any) -> Any:
    """Count a value that becomes a part of a text."""
    _spend(_work(value))
    return value


def _size(value: Any) -> int:
    """Return the length of a value; of a number, how often it may repeat something."""
    if isinstance(value, int):
        return max(1, abs(value))
    return max(1, len(value)) if isinstance(value, Sized) and not isinstance(value, Undefined) else 1


def _work(value: Any) -> int:
    if isinstance(value, Undefined) or not isinstance(value, Sized):
        return 0
    return len(value) * (1 if isinstance(value, str) else _ELEMENT)


def _require(size: int) -> None:
    if size > LARGEST:
        raise TooMuch(f"it would make a value of more than {LARGEST:,} characters")


def _require_number(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TooMuch(f"it would make a number of more than {_MOST_BITS:,} bits")


def _require_format(text: str) -> None:
    if found := _WIDTH.search(text):
        raise TooMuch(f"it formats with the width {found.group()!r}")


def _spend(work: int) -> None:
    left = _left.get(None)
    if left is not None:  # otherwise the compiler computes a constant
        left[0] -= work
        if left[0] < 0:
            raise TooMuch("it takes too long: it has too many loops, or too large ones")
