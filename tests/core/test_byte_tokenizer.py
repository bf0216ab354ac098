"""The byte tokenizer: text to ids and back."""

from __future__ import annotations

from hypothesis import given, strategies as st

from titan_core.data.byte_tokenizer import ByteTokenizer

BYTE = ByteTokenizer()


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    ids = BYTE.encode_document(text).tolist()
    assert ids == [256, *text.encode(), 257]
    assert BYTE.decode(ids) == f"<|begin_of_text|>{text}<|end_of_text|>"


def test_special_names_in_a_document_are_plain_text() -> None:
    assert BYTE.encode_document("<|end_of_text|>").tolist().count(257) == 1
    assert BYTE.vocab_size == 258


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    """JSON may contain them, but they cannot be encoded."""
    assert BYTE.encode_document("a\ud83db").tolist() == [256, *"a\ufffdb".encode(), 257]
