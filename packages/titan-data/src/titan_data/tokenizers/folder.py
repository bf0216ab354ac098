"""Resolves the files of a Hugging Face tokenizer's folder as ``transformers`` does: its tokens, and their roles.

``tokenizer.json`` has the vocabulary. Tokens that other files name and that it lacks follow it, with the next ids, whatever
ids the files give them. The roles of tokens (``bos_token`` ...) are those of ``tokenizer_config.json``. If that has no
``added_tokens_decoder`` (older versions), ``special_tokens_map.json`` takes precedence over it, and ``added_tokens.json``
adds tokens; otherwise neither is read.

Source: ``PreTrainedTokenizerFast.from_pretrained`` in transformers 5.20 to 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from titan_core.api import UserError
from titan_core.toolkit.plain_json import read_object

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FETCH: Final = "download the file again (`titan tokenizer download OWNER/NAME`)"

_Token: TypeAlias = "str | AddedToken"
_DECODER, _EXTRA, _ADDITIONAL = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_FLAGS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}


class TokenizerFolder:
    """The special tokens of a tokenizer, to which those are added that it lacks."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None) -> None:
        """
        Args:
            folder: where the tokenizer's files are; ``None`` if only ``tokenizer.json`` belongs to it.

        Raises:
            UserError: a file is damaged, or cannot be resolved.
        """
        self._folder = folder or Path()
        names = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS) if folder is not None else ()
        self._files = {
            name: read_object(self._folder / name, FETCH, inside=self._folder)
            for name in names
            if (self._folder / name).exists()
        }
        self.config: Mapping[str, Any] = self._files.get(CONFIG, {})
        """The contents of ``tokenizer_config.json``."""
        if "fast_tokenizer_files" in self.config:
            why = "fast_tokenizer_files names a file for each version of transformers, and Titan reads tokenizer.json only"
            raise UserError.one(str(self._folder / CONFIG), why, "remove the key, if tokenizer.json is the right file")
        self.legacy = _DECODER not in self.config
        """Whether the files of older versions are read."""
        self.named: dict[str, str | None] = {}
        """Role -> the text of its token, or null if a file says so."""
        self.added: frozenset[str] = frozenset()
        """Tokens that ``tokenizer.json`` lacks."""
        self._tokenizer = tokenizer
        self._add_tokens(tokenizer)

    def flag(self, key: str) -> bool | None:
        """Return the value of a key of ``tokenizer_config.json`` that is true or false; ``None`` if it is not set."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(CONFIG, key, value, "true or false")
        return value

    def ids_in(self, name: str, role: str) -> list[int] | None:
        """Return the ids of the token that file ``name`` gives a role; ``None`` if it does not mention the role."""
        if role not in self._files.get(name, {}):
            return None
        token = self._token(name, role, self._files[name][role])
        found = None if token is None else self._tokenizer.token_to_id(str(token))
        return [] if found is None else [found]

    def id_in_decoder(self, token: str) -> int | None:
        """Return the id that ``added_tokens_decoder`` gives ``token``."""
        found = (key for key, one in (self.config.get(_DECODER) or {}).items() if one.get("content") == token)
        return next(map(int, found), None)

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        from tokenizers import AddedToken

        known = tokenizer.get_added_tokens_decoder()
        named, extra, special_before = self._special_tokens()
        if tokenizer.padding is not None:
            named.setdefault("pad_token", tokenizer.padding["pad_token"])
        decoder = self._decoder(special_before)
        by_text = {str(token): token for token in (decoder | (known if self.legacy else {})).values()}
        for role in ROLES:
            if named.get(role) is not None:
                named[role] = by_text.get(str(named[role]), named[role])
        present = {repr(token) for token in known.values()}
        new: list[_Token] = [token for _, token in sorted(decoder.items()) if repr(token) not in present]
        texts = {str(token) for token in (*known.values(), *new)}
        in_order = {**{role: named.get(role) for role in ROLES}, **named}
        for token in (*in_order.values(), *extra):
            if token is not None and str(token) not in texts and token not in new:
                new.append(token)  # the last one with a text decides on its flags
        special = {str(token) for token in named.values() if token is not None}
        added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in new]
        for token in added:
            token.special = token.special or token.content in special
        self.added = frozenset(token.content for token in added if tokenizer.token_to_id(token.content) is None)
        tokenizer.add_tokens(added)
        self.named = {role: None if token is None else str(token) for role, token in named.items()}

    def _special_tokens(self) -> tuple[dict[str, _Token | None], list[_Token], set[str]]:
        """Return the tokens by role, those of the model's own roles last; further special tokens; and those that are special
        when ``added_tokens.json`` is read: the library has not yet read objects in ``tokenizer_config.json`` then, and does
        not look at every key."""
        named: dict[str, _Token | None] = {}
        own: dict[str, _Token | None] = {}
        texts: dict[str, _Token | None] = {}  # the library reads them last
        extra: list[_Token] | None = None
        early: dict[str, str] = {}
        for name in [CONFIG, SPECIAL_TOKENS] if self.legacy else [CONFIG]:
            values = self._files.get(name, {})
            for role in (one for one in ROLES if one in values):
                named[role] = self._token(name, role, values[role])
                early[role] = "" if name == CONFIG and isinstance(values[role], dict) else str(named[role] or "")
            for key, value in values.items():
                if key.endswith("_token") and key not in ROLES and isinstance(value, str | dict):
                    (texts if name == CONFIG and isinstance(value, str) else own)[key] = self._token(name, key, value)
            more, key = values.get(_EXTRA), _EXTRA
            if isinstance(more, dict):
                texts |= {role: self._token(name, role, value) for role, value in more.items()}
                more = None
            if not more and extra is None:
                more, key = values.get(_ADDITIONAL), _ADDITIONAL
            if more:
                if not isinstance(more, list):
                    raise self._wrong(name, key, more, "a list of tokens")
                new = [token for value in more if (token := self._token(name, key, value)) is not None]
                extra = [*(extra or []), *new]
                if name == CONFIG or key == _EXTRA:
                    early |= {str(one): str(one) for one in new if name == SPECIAL_TOKENS or isinstance(one, str)}
        return named | own | texts, extra or [], {*early.values()}

    def _decoder(self, special: set[str]) -> dict[int, AddedToken]:
        """Return the tokens that files other than ``tokenizer.json`` add, by the ids that they give them."""
        from tokenizers import AddedToken

        if not self.legacy:
            entries = self.config[_DECODER]
            if not isinstance(entries, dict):
                raise self._wrong(CONFIG, _DECODER, entries, "an object")
            found = {}
            for key, value in entries.items():
                if not key.isdecimal() or not isinstance(value, dict):
                    raise self._wrong(CONFIG, _DECODER, {key: value}, "an id with a token")
                token = self._token(CONFIG, f"{_DECODER}[{key}]", value)
                assert isinstance(token, AddedToken)
                found[int(key)] = token
            return found
        found = {}
        for text, number in self._files.get(ADDED_TOKENS, {}).items():
            if isinstance(number, bool) or not isinstance(number, int):
                raise self._wrong(ADDED_TOKENS, text, number, "an id")
            is_special = text in special
            found[number] = AddedToken(text, normalized=not is_special, special=is_special)
        return found

    def _token(self, name: str, key: str, value: Any) -> _Token | None:
        """Return the token that ``value`` is, as a text or an object."""
        from tokenizers import AddedToken

        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise self._wrong(name, key, value, "a token")
        flags = {flag: one for flag, one in value.items() if flag != "__type"}
        if name == SPECIAL_TOKENS:
            flags["special"] = True
        if not flags.keys() <= _FLAGS or not all(isinstance(one, bool) for flag, one in flags.items() if flag != "content"):
            raise self._wrong(name, key, value, "a token with known flags")
        return AddedToken(**flags)

    def _wrong(self, name: str, key: str, value: Any, what: str) -> UserError:
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return UserError.one(str(self._folder / name), f"{key} is {shown}, not {what}", FETCH)
