"""Templates of fields (``data.format``), and templates of chats: what they render, and what they can neither do nor take."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import CorruptRecord, UserError
from titan_data.record_template import RecordTemplate
from titan_data.tokenizers.chat_template import ChatTemplate

RECORD = {
    "question": "who?", "answer": "me", "steps": ["one", "two"], "id": 7, "none": None, "my field": "x", "flag": True,
    "long": "a" * 100_000,
}  # fmt: skip
SECONDS = 120.0
"""CPU time that no template may take: most reach a bound within a second, the last in 15 on a slow machine. Without a bound
they take hours."""

RENDERED = {
    "{{ question }}\n{{ answer }}\n": "who?\nme\n",
    "{{ id + 1 }}. {{ question | upper }}": "8. WHO?",
    "{% for step in steps %}{{ loop.index }}: {{ step }}\n{% endfor %}": "1: one\n2: two\n",
    "{{ steps | join(', ') }}": "one, two",
    "{{ record['my field'] }} {{ steps[1] }}": "x two",
    "{% if none is none %}-{% endif %}{{ hint | default('no hint') }}": "-no hint",
    "{{ steps | tojson }}": '["one", "two"]',
    "{% set text = question ~ ' ' ~ answer %}{{ text.split()[0] }}": "who?",
    "{% macro line(text) %}<{{ text }}>{% endmacro %}{{ line(answer) }}": "<me>",
}
HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ record.__init__.__globals__ }}",
    "through a filter": "{{ '' | attr('__class__') }}",
    "through map": "{{ [''] | map(attribute='__class__') | list }}",
    "through a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a function": "{{ lipsum.__globals__['os'].system('true') }}",
    "a cycler": "{{ cycler.__init__.__globals__.os }}",
    "self": "{{ self.__init__.__globals__ }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "changed data": "{{ record.update({'a': 1}) }}",
}
ENDLESS = {
    "range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "nested": "".join(f"{{% for i{n} in range(99999) %}}" for n in range(5)) + "x" + "{% endfor %}" * 5,
    "nested over the record": "".join(f"{{% for i{n} in long %}}" for n in range(5)) + "{% endfor %}" * 5,
    "product": "{{ 'x' * 10**9 }}",
    "product of fields": "{{ [long] * 10**8 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "squares": "{% set n = namespace(x=9**99) %}{% for i in steps * 50 %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x=long) %}{% for i in steps * 50 %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by hand": "{% set x0 = long %}" + "".join(f"{{% set x{n + 1} = x{n} ~ x{n} %}}" for n in range(40)),
    "center": "{{ answer | center(10**10) }}",
    "ljust": "{{ answer.ljust(10**10) }}",
    "format": "{{ '{:9999999999}'.format(answer) }}",
    "format with a width": "{{ '{:{}}'.format(answer, 10**10) }}",
    "percent": "{{ '%9999999999s' % answer }}",
    "percent with a width": "{{ '%*d' % (10**10, 1) }}",
    "format filter": "{{ '%9999999999s' | format(answer) }}",
    "indent": "{{ (steps * 50000) | join('\n') | indent(10**6) }}",
    "batch": "{{ steps | batch(10**10, 'x') | list }}",
    "replace": "{{ long | replace('a', long) }}",
    "replace often": "{{ long" + " | replace('a', 'aaaaaaaaaa')" * 9 + " }}",
    "join": "{{ long | join(long) }}",
    "escapes": "{{ long" + " | tojson" * 40 + " }}",
    "macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "macro of depth": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(80) }}",
    "recursive": "{% for x in steps recursive %}{{ loop(steps) }}{% endfor %}",
    "filters in a loop": "{% for i in long %}{{ long | upper | length }}{% endfor %}",
    "numbers": "{% for i in long %}{{ long | list | sort | first }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "brackets": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "deep": "{{ " + "not " * 100_000 + "1 }}",
}
SLOW = {"numbers"}
"""Templates that take long to reach a bound."""


@pytest.mark.parametrize("source", RENDERED)
def test_a_template_renders_fields(source: str) -> None:
    assert RecordTemplate(source, "data.format").text(RECORD, "here") == RENDERED[source]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ hint }}", "data.format: 'hint' is undefined in the record (fields: question, answer, "),
        ("{{ none }}", "data.format: a value between braces is null, not text"),
        ("{{ steps }}", "data.format: a value between braces is an array, not text"),
        ("{{ flag }}", "data.format: a value between braces is a boolean, not text"),
        ("{{ steps.nothing }}", "data.format: 'list object' has no attribute 'nothing' in the record"),
        ("{{ question + 1 }}", "data.format: can only concatenate str"),
        ("{{ 1 / 0 }}", "data.format: division by zero"),
    ],
)
def test_a_record_that_does_not_fit_is_corrupt(source: str, why: str) -> None:
    with pytest.raises(CorruptRecord) as caught:
        RecordTemplate(source, "data.format").text(RECORD, "data.jsonl:3")
    assert caught.value.place == "data.jsonl:3"
    assert caught.value.why.startswith(why)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=pytest.mark.full if name in SLOW else ())
        for name, source in {**HOSTILE, **ENDLESS}.items()
    ],
)
def test_no_template_runs_code_or_takes_without_bounds(source: str, tmp_path: Path) -> None:
    """Neither a format nor a chat template. A template that renders something harmless passes, if it ends soon."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in (_record_text, _chat_text):
        try:
            found = text(source)
        except (UserError, CorruptRecord):
            continue
        assert len(found) < 10_000_000
        assert not any(word in found for word in ("<class", "<function", "<module", "root:"))
    assert time.process_time() - started < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: 1 GiB


def _record_text(source: str) -> str:
    return RecordTemplate(source, "data.format").text(RECORD, "here")


def _chat_text(source: str) -> str:
    messages: Any = [{"role": "user", "content": "a" * 100_000}]
    names = (
        "{% set long = messages[0].content %}{% set steps = ['one', 'two'] %}{% set answer = 'me' %}{% set record = {} %}"
    )
    return ChatTemplate(names + source, {}, "chat_template.jinja").render(messages).text
