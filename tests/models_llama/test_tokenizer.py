"""Llama 3's tokenizer: text to ids and back."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from harness.contexts import tokenizer_at
from titan_core.api import UserError
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_models_llama.tokenizer import build as build_llama3

BYTE = ByteTokenizer()


def rank_file(path: Path, merges: list[bytes]) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + merges
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_llama3_rank_file(tmp_path: Path) -> None:
    tokenizer = build_llama3(tokenizer_at(rank_file(tmp_path / "tokenizer.model", [b"he", b"ll", b"hell", b"hello", b" w"])))
    assert tokenizer.vocab_size == 261 + 256
    # as in Llama 3.1, counted from the first special id: 128000 begin, 128001 end
    assert tokenizer.encode_document("hello w").tolist() == [261, 259, 260, 262]
    names = tokenizer.decode(range(261, 261 + 12))
    assert names.startswith("<|begin_of_text|><|end_of_text|><|reserved_special_token_0|><|reserved_special_token_1|>")
    assert names.endswith("<|eom_id|><|eot_id|><|python_tag|><|reserved_special_token_3|>")
    assert tokenizer.decode([261 + 255]) == "<|reserved_special_token_247|>"


def test_numbers_are_split_into_three_digits(tmp_path: Path) -> None:
    merges = [b"12", b"123", b"45", b"1234", b"12345"]
    tokenizer = build_llama3(tokenizer_at(rank_file(tmp_path / "tokenizer.model", merges)))
    assert [tokenizer.decode([token]) for token in tokenizer.encode_document("12345")[1:-1]] == ["123", "45"]


def test_a_million_blanks_do_not_make_tiktoken_panic(tmp_path: Path) -> None:
    tokenizer = build_llama3(tokenizer_at(rank_file(tmp_path / "tokenizer.model", [b"  "])))
    text = "a" + " " * 1_000_000 + "b"
    assert tokenizer.decode(tokenizer.encode_document(text)[1:-1]) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", r"tokenizer\.model:1: is not a line of a rank file"),
        (b"aGU= 0\n", "a byte has no rank"),
        (None, r"no such file; run `titan tokenizer download meta-llama/Llama-3.1-8B`"),
    ],
)
def test_a_bad_rank_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        build_llama3(tokenizer_at(path))


def test_the_fingerprint_depends_only_on_the_ids(tmp_path: Path) -> None:
    def made(name: str, merges: list[bytes]) -> str:
        return build_llama3(tokenizer_at(rank_file(tmp_path / name, merges))).fingerprint()

    assert made("one", [b"th", b"the"]) == made("two", [b"th", b"the"])
    assert len({BYTE.fingerprint(), made("one", [b"th", b"the"]), made("two", [b"th", b"qu"])}) == 3


def test_llamas_special_tokens_are_never_confused_with_others(tmp_path: Path) -> None:
    path = rank_file(tmp_path / "tokenizer.model", [b"he"])
    path.with_name("tokenizer.model.json").write_text("{}")
    with pytest.raises(UserError, match=r'is not Llama 3\'s: .* set model\.tokenizer = "hf"'):
        build_llama3(tokenizer_at(path))
