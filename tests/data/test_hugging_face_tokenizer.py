"""Tokenizers from Hugging Face files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from harness.contexts import tokenizer_at
from titan_core.api import UserError
from titan_data.tokenizers.hugging_face import build as build_hf


def test_a_tokenizer_file_is_read_and_marks_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world " * 20], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_hf(tokenizer_at(tmp_path))
    ids = ours.encode_document("hello </s> wörld")
    assert (ids[0], ids[-1]) == (0, 1)
    assert ids.count(1) == 1
    assert ours.decode(ids[1:-1]) == "hello </s> wörld"
    assert ours.vocab_size == tokenizer.get_vocab_size()
    (tmp_path / "bad.json").write_text("nonsense")
    for path, message in ((tmp_path / "bad.json", "not a tokenizer.json"), (tmp_path / "none.json", "no such file")):
        with pytest.raises(UserError, match=message):
            build_hf(tokenizer_at(path))


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.symlink_to("../other.json")
    why = f"{file}: cannot be read: is a link to a file outside of {file.parent}; "
    with pytest.raises(UserError, match=re.escape(why)):
        build_hf(tokenizer_at(file.parent))
    file.unlink()
    file.touch()
    os.truncate(file, 1 << 30)
    with pytest.raises(UserError, match=re.escape(f"{file}: cannot be read: is longer than 67,108,864 bytes; ")):
        build_hf(tokenizer_at(file))
