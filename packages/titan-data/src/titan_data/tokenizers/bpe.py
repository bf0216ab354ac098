"""Trains a byte-level BPE tokenizer and writes it for ``tokenizers`` and for ``tiktoken``, with the same ids in both.

Both split a text by the same regular expression and merge bytes within each piece, but by different rules: ``tokenizers``
applies a list of pairs in its order, ``tiktoken`` joins whichever neighbours form the token of lowest rank. The rules agree
if the n-th merge creates the n-th token after the bytes, which :func:`ranks_of` checks. A token then always forms from the
same two parts, those that it forms from on its own, because no merge has crossed its ends before. So ``tiktoken`` never
finds a pair that the list lacks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.byte_level import byte_characters
from titan_data.hub import TOKENIZER_FILES

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
PAD = "<|finetune_right_pad_id|>"
SPECIAL_TOKENS = (BEGIN, END, PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
"""Special tokens of every trained tokenizer, with Llama 3's names: documents, padding, and the turns of a chat."""
NUM_BYTES = 256

# Llama 3's and GPT-4's: contractions, words with one leading character, up to three digits, punctuation, line ends, blanks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LEAST_COUNT = 2
"""A pair of tokens that occurs once in the corpus is not worth a token."""


def train(texts: Iterable[str], num_tokens: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with ``num_tokens`` tokens (fewer, if the texts contain too few pairs), followed by
    ``special_tokens``. The result does not depend on the order of the texts or on the number of threads.

    Args:
        num_tokens: number of tokens without the special ones; at least :data:`NUM_BYTES`.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=_LEAST_COUNT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    begin = tokenizer.token_to_id(BEGIN)
    # As Llama 3's: a prompt begins with the begin token.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def ranks_of(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of each token of ``tokenizer`` but the special ones, by id.

    Raises:
        RuntimeError: ``tiktoken`` would merge in another order.
    """
    model = json.loads(tokenizer.to_str())["model"]
    to_byte = _bytes_by_character()
    ids: dict[str, int] = model["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    made = [left + right for left, right in map(_pair, model["merges"])]
    if made != tokens[NUM_BYTES:] or list(map(ids.__getitem__, tokens)) != list(range(len(tokens))):
        raise RuntimeError("tokenizers trained a vocabulary whose order is not the order of its merges")
    return [bytes(to_byte[character] for character in token) for token in tokens]


def write(tokenizer: Tokenizer, special_tokens: Sequence[str], folder: Path) -> None:
    """Write ``tokenizer`` to ``folder``, replacing the tokenizer in it: ``tokenizer.json`` and its config for ``tokenizers``
    and ``transformers``; ``tokenizer.model`` and a description of what its format leaves out for ``tiktoken``."""
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks_of(tokenizer)))
    special = {token: tokenizer.token_to_id(token) for token in special_tokens}
    about = {"pattern": PATTERN, "begin": BEGIN, "end": END, "special_tokens": special}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    contents = {
        "tokenizer_config.json": _json(config),
        "tokenizer.model.json": _json(about),
        "tokenizer.model": ranks,
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
    }
    for name in TOKENIZER_FILES:
        if name not in contents:
            (folder / name).unlink(missing_ok=True)
    for name, content in contents.items():
        with atomic_write(folder / name) as part:
            part.write_bytes(content)


def _bytes_by_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for."""
    return {character: byte for byte, character in enumerate(byte_characters())}


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
