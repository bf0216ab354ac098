"""Templates of fields (``data.format``), and templates of chats: what they render, and what they can neither do nor take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import CorruptRecord, UserError
from titan_data import template_process
from titan_data.records import RecordTemplate
from titan_data.template_process import Renderer
from titan_data.tokenizers.chat_template import ChatTemplate

RECORD = {
    "question": "who?", "answer": "me", "steps": ["one", "two"], "id": 7, "none": None, "my field": "x", "flag": True,
    "long": "a" * 100_000,
}  # fmt: skip

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
FREE = {
    # What a count of a template's operations does not see.
    "slices": "{% for i in range(99999) %}{% set part = long[:i] %}{% endfor %}" * 9,
    "comparisons": "{% for i in range(99999) %}{% set same = long ~ 'a' == long ~ 'a' %}{% endfor %}" * 9,
    "in": "{% set many = 'a' * 99999 %}{% for i in range(99999) %}{% set found = many ~ 'b' in long * 9 %}{% endfor %}",
    "shared lists": "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | string }}",
    "striptags": "{{ ('<' * 5000000) | striptags }}",
    "groupby": "{% for i in range(999) %}{{ long | list | groupby(0) | length }}{% endfor %}",
    "pprint": "{% set x = [long | list] * 99 %}{{ x | pprint }}",
    "title": "{% for i in range(99999) %}{{ long | title | length }}{% endfor %}",
    "format specification": "{{ '{:0>999999999}{:0>999999999}'.format(1, 2) }}",
    "a constant": "{% set x = 9 ** 9 ** 9 %}",
    "a constant text": "{{ 'x' * 999999999 * 9 }}",
    "operators": "{{ 1 " + "+ 1 " * 50_000 + "}}",
    "filters": "{{ 1" + " | string" * 20_000 + " }}",
    "blocks": "{% if 1 %}" * 30_000 + "{% endif %}" * 30_000,
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "a million names": "{% set " + ", ".join(f"x{n}" for n in range(200_000)) + " = long %}",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """A renderer with less time, so that a template that never ends costs a test little."""
    quick = Renderer(cpu_seconds=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_process, "renderer", quick)
        yield quick
    quick.end()


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


ROWS = {**HOSTILE, **ENDLESS, **FREE}
QUICK = {*HOSTILE, "power", "doubling", "macro of depth", "brackets", "slices", "shared lists", "pprint", "operators"}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in ROWS])
def test_no_template_runs_code_or_takes_without_bounds(name: str, renderer: Renderer) -> None:
    """Neither a format nor a chat template. A template that renders something harmless passes, if it ends soon."""
    for text in (_record_text, _chat_text):
        try:
            found = text(ROWS[name])
        except (UserError, CorruptRecord):
            continue
        assert len(found) < 10_000_000
        assert not any(word in found for word in ("<class", "<function", "<module", "root:"))
        assert _record_text("{{ answer }}") == "me"


MEASURED = """
import json, resource, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from test_record_templates import ROWS, _chat_text, _record_text
from titan_core.api import CorruptRecord, UserError
_record_text("{{ answer }}")
for name in json.loads(sys.argv[2]):
    for language in (_record_text, _chat_text):
        started = time.monotonic()
        try:
            answer = f"{len(language(ROWS[name]))} characters"
        except (UserError, CorruptRecord) as error:
            answer = str(error).splitlines()
            assert len(answer) == 1, answer
        print(json.dumps([name, language.__name__, time.monotonic() - started, str(answer)[:200]]), flush=True)
from titan_data.template_process import renderer
renderer.end()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)  # of the largest renderer, in KiB
"""


@pytest.mark.parametrize(
    "names",
    [["doubling by hand", "shared lists"], pytest.param(sorted({*ENDLESS, *FREE}), marks=pytest.mark.long)],
    ids=["two", "all"],
)
@pytest.mark.full
def test_time_and_memory_of_hostile_templates(names: list[str]) -> None:
    """With the limits of a job: each answers within 30 s, and takes at most 1 GiB. The long form tries all of them."""
    command = [sys.executable, "-c", MEASURED, json.dumps([str(Path(__file__).parent), *sys.path]), json.dumps(names)]
    *lines, memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 2 * len(names)
    assert [row for row in rows if row[2] > 30] == []
    assert int(memory) < 1 << 20


def _record_text(source: str) -> str:
    return RecordTemplate(source, "data.format").text(RECORD, "here")


def _chat_text(source: str) -> str:
    messages: Any = [{"role": "user", "content": "a" * 100_000}]
    names = (
        "{% set long = messages[0].content %}{% set steps = ['one', 'two'] %}{% set answer = 'me' %}{% set record = {} %}"
    )
    return ChatTemplate(names + source, {}, "chat_template.jinja").render(messages).text
