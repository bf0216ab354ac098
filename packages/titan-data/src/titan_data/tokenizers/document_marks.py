"""Which tokens mark a document's begin and end, as the files of a Hugging Face tokenizer say.

The files may each say it, and may contradict each other. In this order:

1. ``bos_token`` and ``eos_token`` of ``tokenizer_config.json``, then of ``special_tokens_map.json``. There,
   ``add_bos_token = false`` means no begin; ``add_eos_token`` is about prompts, which do not end, and does not count.
2. What the post-processor of ``tokenizer.json`` puts around a text. Where it puts the named token and others, all count.
3. Names that such tokens have had, where no file says anything.

A ``bos_token`` that is the ``eos_token`` too (GPT-2's) stands between documents once, unless the tokenizer adds it to texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titan_core.api.errors import UserError
from titan_core.api.tools.plain_json import read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, SPECIAL_TOKENS, TOKENIZER = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"
POST_PROCESSOR = f"the post-processor of {TOKENIZER}"

_BEGINS = ("<|begin_of_text|>", "<s>", "[CLS]", "<bos>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[SEP]", "<eos>")
_FETCH = "fetch the file again"

_Ids = tuple[int, ...]


@dataclass(frozen=True)
class Marks:
    """Of one side of a document."""

    ids: _Ids
    source: str
    """Which file says so."""
    contradiction: str = ""
    """What another file says."""


@dataclass(frozen=True)
class DocumentMarks:
    """Of both sides."""

    begin: Marks
    end: Marks


def document_marks(tokenizer: Tokenizer, folder: Path | None) -> DocumentMarks:
    """The marks of ``tokenizer``, whose other files are in ``folder``.

    Raises:
        UserError: a file is damaged, or names a token that the tokenizer does not have.
    """
    files = _Files(tokenizer, folder)
    before, after = _added(tokenizer)
    end = _choose(files.named("eos_token"), after) or _by_name(tokenizer, _ENDS)
    adds_begin = files.adds_begin()
    named = files.named("bos_token")
    if adds_begin is False:
        says = f"{POST_PROCESSOR} puts {_shown(before)} before a text" if before else ""
        return DocumentMarks(Marks((), f"add_bos_token in {CONFIG}", says), end)
    if named is not None and named.ids and named.ids == end.ids and not before and not adds_begin:
        return DocumentMarks(Marks((), f"{named.source}: the same token ends documents"), end)
    return DocumentMarks(_choose(named, before) or _by_name(tokenizer, _BEGINS), end)


def _choose(named: Marks | None, added: _Ids) -> Marks | None:
    """Of what the config files name and what the post-processor adds; ``None`` where neither says anything."""
    if named is None:
        return Marks(added, POST_PROCESSOR) if added else None
    if not added or added == named.ids:
        return named
    if named.ids and named.ids[0] in added:
        return Marks(added, f"{named.source}, and {POST_PROCESSOR}")
    return Marks(named.ids, named.source, f"{POST_PROCESSOR} puts {_shown(added)} there")


def _by_name(tokenizer: Tokenizer, names: Sequence[str]) -> Marks:
    ids = [token for name in names if (token := tokenizer.token_to_id(name)) is not None]
    return Marks(tuple(ids[:1]), "its name alone, as no file says" if ids else "no file says any")


def _added(tokenizer: Tokenizer) -> tuple[_Ids, _Ids]:
    """What the post-processor puts before and after a text."""
    for text in ("a", "0", "the"):
        try:
            encoding = tokenizer.encode(text, add_special_tokens=True)
        except Exception:  # noqa: BLE001 - the library raises bare Exception for a text that the vocabulary does not cover
            continue
        own = [place for place, special in enumerate(encoding.special_tokens_mask) if not special]
        if own:
            return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
    return (), ()


def _shown(ids: Sequence[int]) -> str:
    return f"token{'s' if len(ids) != 1 else ''} {', '.join(map(str, ids))}"


class _Files:
    """The two files beside ``tokenizer.json``, each as far as it is there."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None) -> None:
        self._tokenizer = tokenizer
        self._folder = folder or Path()
        names = (CONFIG, SPECIAL_TOKENS) if folder is not None else ()
        self._contents = {
            name: read_object(self._folder / name, _FETCH) for name in names if (self._folder / name).is_file()
        }

    def named(self, role: Literal["bos_token", "eos_token"]) -> Marks | None:
        """The token that has the role; without ids where a file says that none has; ``None`` where no file says anything."""
        found = [Marks(self._ids(name, role), name) for name, contents in self._contents.items() if role in contents]
        if not found:
            return None
        first, *others = found
        for other in others:
            if other.ids and other.ids != first.ids:
                says = f"{other.source} says {_shown(other.ids)}"
                # A config that names none may have been written by a version that leaves out what the map has.
                return Marks(first.ids, first.source, says) if first.ids else other
        return first

    def adds_begin(self) -> bool | None:
        """``add_bos_token``."""
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
            why = f"{role} is {token!r}, which {TOKENIZER} does not have"
            raise UserError.one(str(self._folder / name), why, "take all files from one tokenizer")
        for key, other in self._decoder().items():
            if isinstance(other, dict) and other.get("content") == token and key != str(number):
                why = f"added_tokens_decoder gives {token!r} the id {key}, and {TOKENIZER} gives it {number}"
                raise UserError.one(str(self._folder / CONFIG), why, "take all files from one tokenizer")
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
