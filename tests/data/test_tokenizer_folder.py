"""The files of a tokenizer's folder, in combinations and contradictions, resolved as ``transformers`` resolves them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from harness.contexts import tokenizer_at
from titan_data.tokenizers.folder import ROLES, TokenizerFolder
from titan_data.tokenizers.hugging_face import build

# Older versions resolve a folder by other rules. A lower bound in the test group would raise those of titan-data, which
# does not use transformers.
transformers = pytest.importorskip("transformers", minversion="5.20")

IN_FILE = ("<s>", "</s>", "<pad>")
TEXTS = ("a b c", "<s> a </s>", "a<new>b <other> c", " <x> a", "<end>", "", "d <y>")


def flagged(token: str, **flags: bool) -> dict[str, Any]:
    """Return a token as ``tokenizer_config.json`` has it."""
    known = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": token, **known, **flags}


def named(token: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **flagged(token, **flags)}


def in_map(token: str) -> dict[str, Any]:
    return {key: value for key, value in flagged(token).items() if key != "special"}


CHOICES: dict[str, list[dict[str, Any]]] = {
    # parts of a folder: config, special_tokens_map.json, added_tokens.json, or the post-processor and padding
    "decoder": [
        {},
        {"config": {"added_tokens_decoder": {}}},
        {"config": {"added_tokens_decoder": {"128000": flagged("<new>"), "128001": flagged("<end>")}}},
        {"config": {"added_tokens_decoder": {"9": flagged("<s>"), "3": flagged("<new>", special=False)}}},
        {"config": {"added_tokens_decoder": {"20": flagged("</s>", lstrip=True), "10": flagged("<x>", rstrip=True)}}},
        {"config": {"added_tokens_decoder": {"1": flagged("b"), "0": flagged("<other>", normalized=True, special=False)}}},
    ],
    "begin": [
        {},
        {"config": {"bos_token": None}},
        {"config": {"bos_token": "<s>"}},
        {"config": {"bos_token": "<new>"}},
        {"config": {"bos_token": "a"}},
        {"config": {"bos_token": named("<s>")}},
        {"config": {"bos_token": named("<new>", normalized=True, special=False)}},
    ],
    "end": [
        {},
        {"config": {"eos_token": "</s>"}},
        {"config": {"eos_token": "<end>"}},
        {"config": {"eos_token": named("<end>", lstrip=True)}},
        {"config": {"eos_token": "<s>", "pad_token": "<pad>", "unk_token": "<other>"}},
    ],
    "map": [
        {},
        {"map": {"bos_token": "<s>", "eos_token": "</s>"}},
        {"map": {"bos_token": in_map("<new>"), "pad_token": "<pad>"}},
        {"map": {"bos_token": None}},
        {"map": {"eos_token": in_map("<end>"), "additional_special_tokens": ["<x>", "<y>"]}},
        {"map": {"extra_special_tokens": ["<y>", in_map("<x>")]}},
        {"map": {"mask_token": "<other>"}},
    ],
    "added": [{}, {"added": {"<x>": 50, "<y>": 40}}, {"added": {"</s>": 3, "<new>": 7}}, {"added": {"<end>": 0}}],
    "flags": [
        {},
        {"config": {"add_bos_token": True, "add_eos_token": True}},
        {"config": {"add_bos_token": False, "add_eos_token": False}},
    ],
    "post-processor": [{}, {"post": "<s> $A"}, {"post": "<s> $A </s>"}],
    "extra": [
        {},
        {"config": {"additional_special_tokens": ["<x>", "<s>"]}},
        {"config": {"extra_special_tokens": ["<y>"], "additional_special_tokens": ["<x>"]}},
        {"config": {"extra_special_tokens": {"image_token": "<x>"}}},
        {"config": {"image_token": "<y>", "audio_token": named("<x>")}},
        {"config": {"additional_special_tokens": [named("<x>", special=False)]}},
    ],
    "padding": [{}, {}, {"padding": "<pad>"}],
    "more": [
        {},
        {"config": {"clean_up_tokenization_spaces": True}},
        {"config": {"model_max_length": 5, "tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}},
    ],
}  # fmt: skip


def rows() -> list[list[dict[str, Any]]]:
    """Return each choice alone, and 1,000 combinations."""
    alone = [[choice] for choices in CHOICES.values() for choice in choices]
    draw = random.Random(0)
    return [*alone, *([draw.choice(choices) for choices in CHOICES.values()] for _ in range(1000))]


ROWS = rows()
SHARE = 100


def write(folder: Path, row: list[dict[str, Any]]) -> None:
    words = {"a": 0, "b": 1, "c": 2, "<unk>": 3, "<s>": 4, "</s>": 5, "<pad>": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(IN_FILE))
    parts = {key: value for choice in row for key, value in choice.items() if key in ("post", "padding")}
    if "post" in parts:
        single, tokens = parts["post"], [(token, words[token]) for token in IN_FILE]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=tokens)
    if "padding" in parts:
        tokenizer.enable_padding(pad_id=words[parts["padding"]], pad_token=parts["padding"])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"config": "tokenizer_config.json", "map": "special_tokens_map.json", "added": "added_tokens.json"}
    for part, name in files.items():
        contents = [choice[part] for choice in row if part in choice]
        (folder / name).unlink(missing_ok=True)
        if contents:
            whole = {key: value for content in contents for key, value in content.items()}
            (folder / name).write_text(json.dumps(whole))


def found_in(folder: Path, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what ``transformers`` and Titan find in ``folder``."""
    expected.backend_tokenizer.no_padding()
    found = build(tokenizer_at(folder))
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = TokenizerFolder(plain, folder)
    plain.no_padding()
    roles = {role: token for role, token in files.named.items() if token is not None}
    yield "roles", expected.special_tokens_map, roles
    for role in ROLES:
        token = roles.get(role)
        yield role, getattr(expected, f"{role}_id"), None if token is None else plain.token_to_id(token)
    yield "vocabulary", expected.get_vocab(), plain.get_vocab()
    yield "size", len(expected), found.vocab_size
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        yield text, ids, plain.encode(text).ids
        without = expected(text, add_special_tokens=False)["input_ids"]
        yield text, without, found.encode_with_special_tokens(text)
        yield text, expected.decode(ids), found.decode(ids)
        yield text, expected.decode(ids, skip_special_tokens=True), plain.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.full if first else ()) for first in range(0, len(ROWS), SHARE)]
)
def test_a_folder_is_resolved_as_in_transformers(first: int, tmp_path: Path) -> None:
    wrong = []
    for row in ROWS[first : first + SHARE]:
        write(tmp_path, row)
        expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        wrong += [(row, *one) for one in found_in(tmp_path, expected) if one[1] != one[2]]
    assert wrong == []


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>", "▁", *"abcd", *(f"<0x{number:02X}>" for number in range(256))]
CLASSES = {
    "GPT2Tokenizer": ("gpt2", LETTERS), "Qwen2Tokenizer": ("qwen2", LETTERS), "GPTNeoXTokenizer": ("gpt_neox", LETTERS),
    "CohereTokenizer": ("cohere", LETTERS), "LlamaTokenizer": ("llama", PIECES), "GemmaTokenizer": ("gemma", PIECES),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Qwen2Tokenizer" else pytest.mark.full) for name in CLASSES]
)
def test_a_folder_that_a_family_writes_is_resolved_as_by_its_class(name: str, tmp_path: Path) -> None:
    """Some classes of transformers have rules and special tokens of their own. They write them to the folder."""
    family, words = CLASSES[name]
    tokenizer = getattr(transformers, name)(vocab={word: number for number, word in enumerate(words)}, merges=[])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(expected).__name__ == name
    assert [one for one in found_in(tmp_path, expected) if one[1] != one[2]] == []
