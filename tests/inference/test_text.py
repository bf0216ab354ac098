"""Text while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_inference.output import TextStream

TEXT = "naïve 你好 🙂 end"


def test_characters_of_several_tokens_appear_whole() -> None:
    stream = TextStream(ByteTokenizer())
    pieces = [stream.add(byte) for byte in TEXT.encode()]
    assert "".join(pieces) + stream.finish() == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:3] == ["n", "a", ""] and pieces[3] == "ï"


class Words(ByteTokenizer):
    """A token is a word, without the space before it at the start of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(chr, ids))


def test_words_are_separated_although_none_begins_with_a_space() -> None:
    stream = TextStream(Words())
    assert [stream.add(token) for token in b"abc"] == ["a", " b", " c"]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    stream = TextStream(ByteTokenizer())
    text = "".join(stream.add(byte) for byte in b"a\xff\xff\xff\xffb\xf0\x9f") + stream.finish()
    assert text.startswith("a") and "b" in text and text.endswith("\ufffd")
