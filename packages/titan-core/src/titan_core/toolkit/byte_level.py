"""Byte-level tokenizers in the format of the library ``tokenizers``, written without that library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from titan_core.api import UserError

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in the format: itself if it is printable in Latin-1, or else the next
    one from U+0100 (GPT-2's encoder)."""
    others = count(0x100)
    return [chr(byte) if byte in _PRINTABLE else chr(next(others)) for byte in range(256)]


def tokenizer_files(
    ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str | None, begin: str, end: str
) -> dict[str, str]:
    """Return the files of a tokenizer, by name, for ``transformers.AutoTokenizer``. It puts ``begin`` before a text and
    nothing after it, so that a model continues the text.

    Args:
        ranks: id of each sequence of bytes. Two sequences are merged in the order of the ids of their results.
        special: id of each special token.
        pattern: splits a text before bytes are merged; ``None``: not at all.

    Raises:
        UserError: the format cannot hold the ids.
    """
    if sorted(special.values()) != list(range(len(ranks), len(ranks) + len(special))):
        why = f"the ids of its special tokens do not follow the other {len(ranks)} without a gap"
        raise UserError.one("the tokenizer", f"has no tokenizer.json: {why}", "pass a tokenizer.json")
    characters = byte_characters()

    def text_of(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    tokens = sorted(ranks, key=lambda token: ranks[token])
    merges = [[text_of(left), text_of(right)] for token in tokens for left, right in _parts(token, ranks)]
    split = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}] if pattern else []
    to_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    text, pair = [{"Sequence": {"id": "A", "type_id": 0}}], [{"Sequence": {"id": "B", "type_id": 1}}]
    contents: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for name, number in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, to_characters]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, *text],
            "pair": [first, *text, {"SpecialToken": {"id": begin, "type_id": 1}}, *pair],
            "special_tokens": {begin: {"id": begin, "ids": [special[begin]], "tokens": [begin]}},
        },
        "decoder": {**to_characters, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text_of(token): ranks[token] for token in tokens},
            "merges": merges,
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(contents, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
    }


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs of sequences that merge into ``token``, those with the lowest ids first."""
    cuts = range(1, len(token))
    pairs = [(token[:cut], token[cut:]) for cut in cuts if token[:cut] in ranks and token[cut:] in ranks]
    return iter(sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])))
