"""Determines which tokens mark the begin and end of a document from the files of a Hugging Face tokenizer.

Several files may define these tokens, and may contradict each other. The order of precedence is:

1. ``bos_token`` and ``eos_token`` in ``tokenizer_config.json``, then in ``special_tokens_map.json``.
   ``add_bos_token = false`` in the former means no begin token. ``add_eos_token`` is ignored: it concerns prompts, which do
   not end.
2. The tokens that the post-processor of ``tokenizer.json`` adds to a text. If it adds the named token and others, all count.
3. If no file defines them, tokens with usual names.

A token that is both ``bos_token`` and ``eos_token`` (GPT-2) only ends documents, unless the tokenizer adds it before texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, SPECIAL_TOKENS, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
POST_PROCESSOR = f"the post-processor of {TOKENIZER}"

_BEGINS = ("<|begin_of_text|>", "<s>", "[CLS]", "<bos>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[SEP]", "<eos>")
DOWNLOAD = "`titan tokenizer download OWNER/NAME` downloads a tokenizer"
"""Ends the fix for a missing or damaged file."""
_FETCH = "download the file again (`titan tokenizer download OWNER/NAME`)"
_SAME_TOKENIZER = "use the files of one tokenizer"

_Ids = tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """The tokens at one end of a document."""

    ids: _Ids
    source: str
    """The file that defines them."""
    contradiction: str = ""
    """The definition in another file, if it differs."""


@dataclass(frozen=True)
class DocumentMarks:
    """The tokens at both ends of a document."""

    begin: Marks
    end: Marks


def document_marks(tokenizer: Tokenizer, folder: Path | None) -> DocumentMarks:
    """Return the marks of ``tokenizer``, whose config files are in ``folder``.

    Raises:
        UserError: a file is damaged, or names a token that the tokenizer does not have.
    """
    files = _Files(tokenizer, folder)
    before, after = _added(tokenizer)
    end = _choose(files.named("eos_token"), after) or _by_name(tokenizer, _ENDS)
    adds_begin = files.adds_begin()
    named = files.named("bos_token")
    if adds_begin is False:
        contradiction = f"{POST_PROCESSOR} adds {_shown(before)} before a text" if before else ""
        return DocumentMarks(Marks((), f"add_bos_token in {CONFIG}", contradiction), end)
    if named is not None and named.ids and named.ids == end.ids and not before and not adds_begin:
        return DocumentMarks(Marks((), f"{named.source}: the same token ends documents"), end)
    return DocumentMarks(_choose(named, before) or _by_name(tokenizer, _BEGINS), end)


def _choose(named: Marks | None, added: _Ids) -> Marks | None:
    """Combine the token that config files name with those that the post-processor adds; ``None`` if there are neither."""
    if named is None:
        return Marks(added, POST_PROCESSOR) if added else None
    if not added or added == named.ids:
        return named
    if named.ids and named.ids[0] in added:
        return Marks(added, f"{named.source}, and {POST_PROCESSOR}")
    return Marks(named.ids, named.source, f"{POST_PROCESSOR} adds {_shown(added)}")


def _by_name(tokenizer: Tokenizer, names: Sequence[str]) -> Marks:
    ids = [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
    return Marks(tuple(ids[:1]), "chosen by name, because no file defines it" if ids else "no file defines one")


def _added(tokenizer: Tokenizer) -> tuple[_Ids, _Ids]:
    """Return the tokens that the post-processor adds before and after a text."""
    for text in ("a", "0", "the"):
        try:
            encoding = tokenizer.encode(text, add_special_tokens=True)
        except Exception:  # noqa: BLE001 - the library raises bare Exception for a text that the vocabulary does not cover
            continue
        content = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        if content:
            return tuple(encoding.ids[: content[0]]), tuple(encoding.ids[content[-1] + 1 :])
    return (), ()


def _shown(ids: Sequence[int]) -> str:
    return f"token{'s' if len(ids) != 1 else ''} {', '.join(map(str, ids))}"


class _Files:
    """The config files next to ``tokenizer.json``, those that exist."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._folder = folder or Path()
        names = (CONFIG, SPECIAL_TOKENS) if folder is not None else ()
        self._contents = {
            name: read_object(self._folder / name, _FETCH) for name in names if (self._folder / name).is_file()
        }

    def named(self, role: Literal["bos_token", "eos_token"]) -> Marks | None:
        """Return the token with the given role; without ids if a file sets it to null, ``None`` if no file mentions it."""
        found = [Marks(self._ids(name, role), name) for name, contents in self._contents.items() if role in contents]
        if not found:
            return None
        first, *others = found
        for other in others:
            if other.ids and other.ids != first.ids:
                contradiction = f"{other.source} says {_shown(other.ids)}"
                # Some versions wrote null to the config for tokens that are in the map.
                return Marks(first.ids, first.source, contradiction) if first.ids else other
        return first

    def adds_begin(self) -> bool | None:
        """The value of ``add_bos_token``; ``None`` if it is not set."""
        value = self._contents.get(CONFIG, {}).get("add_bos_token")
        if value is not None and not isinstance(value, bool):
            raise self._wrong(CONFIG, "add_bos_token", "true or false")
        return value

    def _ids(self, name: str, role: str) -> _Ids:
        value = self._contents[name][role]
        if value is None:
            return ()
        token = value.get("content") if isinstance(value, dict) else value
        if not isinstance(token, str):
            raise self._wrong(name, role, "a token")
        number = self._tokenizer.token_to_id(token)
        if number is None:
            why = f"{role} is {token!r}, which {TOKENIZER} does not contain"
            raise UserError.one(str(self._folder / name), why, _SAME_TOKENIZER)
        for key, other in self._decoder().items():
            if isinstance(other, dict) and other.get("content") == token and key != str(number):
                why = f"{token!r} has the id {key} in added_tokens_decoder, but {number} in {TOKENIZER}"
                raise UserError.one(str(self._folder / CONFIG), why, _SAME_TOKENIZER)
        return (int(number),)

    def _decoder(self) -> Mapping[str, Any]:
        decoder = self._contents.get(CONFIG, {}).get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise self._wrong(CONFIG, "added_tokens_decoder", "an object")
        return decoder

    def _wrong(self, name: str, key: str, what: str) -> UserError:
        shown = json.dumps(self._contents[name][key])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UserError.one(str(self._folder / name), f"{key} is {shown}, not {what}", _FETCH)
