"""Continuations on a terminal and in a pipe."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_inference.output import Continuation, Stream


class Output(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def printed(texts: list[str], is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdout", output := Output(is_terminal))
    continuations = [Continuation(ByteTokenizer(), (), ()) for _ in texts]
    stream = Stream(continuations)
    for continuation, text in zip(continuations, texts, strict=True):
        for byte in text.encode():
            continuation.add(byte)
            stream.show()
    stream.close()
    return output.getvalue()


def test_a_sequence_ends_with_its_end_token_and_keeps_the_others() -> None:
    continuation = Continuation(ByteTokenizer(), {257}, ())
    assert [continuation.add(token) for token in (97, 98, 257)] == [True, True, False]
    assert (continuation.text, continuation.tokens, continuation.ended) == ("ab", [97, 98], True)


def test_no_part_of_a_stop_text_is_shown() -> None:
    continuation = Continuation(ByteTokenizer(), (), ("END", "x"))
    shown = []
    for byte in b"a ENOUGH ENDx":
        continues = continuation.add(byte)
        shown.append(continuation.news())
        if not continues:
            break
    assert "".join(shown) == continuation.text == "a ENOUGH "
    assert shown[:5] == ["", "", "a", " ", "E"]  # two characters could begin "END"


def test_a_text_ends_at_the_first_stop_text() -> None:
    class Words(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            return "one stop two end" if ids else ""

    continuation = Continuation(Words(), (), ("end", "stop"))
    assert not continuation.add(0) and continuation.text == "one "


def test_a_terminal_obeys_nothing_that_a_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(["a\x1b[2J\x9b1mé\n"], True, monkeypatch) == "a\\x1b[2J\\x9b1mé\n\n"
    assert printed(["\x07", "\x08"], True, monkeypatch) == "--- 1 ---\n\\x07\n--- 2 ---\n\\x08\n"


def test_tabs_depend_on_the_row_and_not_on_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ab\tc\n\tx\tyy\tz"
    assert printed([text], True, monkeypatch) == text.expandtabs(4) + "\n"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2J\tb"
    assert printed([text], False, monkeypatch) == text + "\n"
