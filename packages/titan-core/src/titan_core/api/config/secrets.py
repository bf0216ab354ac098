"""Removing secrets from output: run directories, checkpoints, errors, and pages that users share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

REDACTED = "(redacted)"
"""Replaces a secret."""

_BREAK = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
"""Separates the words of a name: ``API_KEY``, ``api-key``, ``apiKey``."""
_ANYWHERE = re.compile(r"passw|passphrase|secret|credential|bearer|authoriz|apikey|accesskey|privatekey")
"""Marks a secret anywhere in a name."""
_WORDS = frozenset({"auth", "oauth", "oauth2", "authentication", "jwt", "jwts", "pwd", "cookie", "cookies"})
_BEFORE_SECRETS = frozenset({"api", "access", "auth", "private", "refresh", "session", "hf", "github"})
"""Words before a secret ``key``, ``keys`` or ``tokens``."""
_PLAIN_KEYS = frozenset({"num", "n", "max", "min", "public", "sort", "primary", "text", "json", "column", "state"})
"""Words before a ``key`` that is not secret: a count, or the name of something to look up."""
_PLAIN_TOKENS = frozenset({"per", "num", "n", "max", "min", "bos", "eos", "pad", "unk", "mask", "cls", "sep", "special"})
"""Words before a ``token`` of text."""
_AFTER_TOKEN = frozenset(
    {"id", "ids", "type", "types", "count", "counts", "budget", "dim", "size", "embedding", "embeddings"}
)
"""Words after a ``token`` of text."""

_USER_AND_PASSWORD = re.compile(r"(://)[^\s/\"<>:@]*:[^\s/\"<>]*@")
_TOKEN_AS_USER = re.compile(r"(https?://)[^\s/\"<>@]+@")
_ASSIGNED = re.compile(
    r"(?P<in_query>[?&])?(?<![\w.%-])(?:(?P<name>[\w.%-]{1,200}+)(?:=(?!=)|\s?=\s?(?=\\?['\"]))"
    r"|\\?['\"](?P<key>[\w.-]{1,200}+)\\?['\"]\s*[:=]\s*(?=\\?['\"]))"
)
"""``name=value`` as in commands, URLs, environments and TOML, and ``"name": value`` of JSON and Python. Prose and code with
blanks and no quotes (``token = one of ...``) are neither."""
_VALUE = re.compile(
    r"(?P<escaped>\\[\"'])(?:(?!(?P=escaped))[^\n])*(?:(?P=escaped))?"
    r"|(?P<quote>[\"'])(?:\\.|(?!(?P=quote))[^\n\\])*(?:(?P=quote))?"
    rf"|(?:{re.escape(REDACTED)}|[^\s\"'&,;<>#)\]}}])+"
)
_PLACEHOLDER = re.compile(r"\\?['\"]?(?:[$<]|\W*$)")
"""A variable (``$HF_TOKEN``), ``<yours>``, or no letter at all."""
_SIGNATURE = re.compile(r"(^|[_-])sig(nature)?$", re.IGNORECASE)
"""The signature of a signed URL, which grants access to its target."""
_KEY_IN_QUERY = frozenset({"key", "pass", "code"})
_SCHEME = r"(?:basic|bearer|token)\s"
_HEADER = re.compile(
    rf"\b(authorization['\"]?\s*[:=]\s*['\"]?{_SCHEME}+|bearer\s+(?=[\w.~+/=-]{{6}}))[^\s'\",;]+"
    r"|\b((?:authorization['\"]?\s*[:=]|(?:set-)?cookie['\"]?\s*:)\s*(?P<quote>['\"])?"
    rf"(?!{_SCHEME}))(?(quote)[^'\"\n]+|[^\n]+)"
    r"|(?<![\w-])((?!-|(?:proxy-)?authorization|set-cookie)(?=x-|[\w-]{1,200}['\"]?:\s)(?=[\w-]{0,100}-)"
    r"[\w-]{1,200}+['\"]?:\s*['\"]?)[^\s'\",;]+",
    re.IGNORECASE,
)
"""HTTP headers: a scheme and its token; anything else of ``Authorization``, and cookies; and names such as ``X-Api-Key``."""


def is_secret(name: str) -> bool:
    """Whether the value of ``name`` (a key, a section, a dotted key or an environment variable) must be removed.

    Matching is by words, not letters: ``hf_token`` is secret, ``tokenizer`` and ``max_tokens`` are not. A bare ``key`` is
    not secret either, because the word is too common.
    """
    return any(_is_secret(part) for part in name.split("."))


def _is_secret(name: str) -> bool:
    if _ANYWHERE.search(name.lower()):
        return True
    words = [word.lower() for word in _BREAK.split(name) if word]
    before = ["", *words]
    after = [*words[1:], ""]
    return any(map(_means_a_secret, before, words, after))


def _means_a_secret(before: str, word: str, after: str) -> bool:
    if word in ("key", "keys"):
        return before in _BEFORE_SECRETS or (before != "" and after == "" and before not in _PLAIN_KEYS)
    if word == "tokens":
        return before in _BEFORE_SECRETS
    if word in ("url", "urls"):
        return before in ("webhook", "webhooks")  # anyone who has it may post
    if word.endswith("token"):
        return before not in _PLAIN_TOKENS and after not in _AFTER_TOKEN
    return word in _WORDS


def is_redacted(value: Any) -> bool:
    """Whether the functions of this module have removed a secret anywhere in ``value``."""
    if isinstance(value, Mapping):
        return any(map(is_redacted, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_redacted, value))
    return isinstance(value, str) and REDACTED in value


def redact(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` without the values of secret keys, all values in secret sections, and passwords within other
    strings. Keys remain, and so do values that reveal nothing: ``None``, booleans and empty values."""
    return _table(config, hide=False)


def _table(table: Mapping[str, Any], hide: bool) -> dict[str, Any]:
    return {key: _value(value, hide or is_secret(str(key))) for key, value in table.items()}


def _value(value: Any, hide: bool) -> Any:
    if isinstance(value, Mapping):
        return _table(value, hide)
    if value is None or isinstance(value, bool) or value in ("", [], ()):
        return value
    if hide:
        return REDACTED
    if isinstance(value, list | tuple):
        return [_value(item, hide) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return ``text`` without the secrets in it: passwords and tokens of URLs (``https://user:password@host``), values of
    secret names (``HF_TOKEN=value``, ``?token=value``, ``{"password": "value"}``), and those of HTTP headers."""
    if "://" in text:
        text = _USER_AND_PASSWORD.sub(rf"\1{REDACTED}@", text)
        text = _TOKEN_AS_USER.sub(rf"\1{REDACTED}@", text)
    parts, start = [], 0
    for found in _ASSIGNED.finditer(text):
        name = unquote(found["name"] or found["key"])
        known = is_secret(name) or _SIGNATURE.search(name) or (found["in_query"] and name.lower() in _KEY_IN_QUERY)
        value = _VALUE.match(text, found.end()) if known and found.start() >= start else None
        if value is not None and not _PLACEHOLDER.match(value[0]):
            mark = value["escaped"] or value["quote"] or ""
            parts.append(f"{text[start : found.end()]}{mark}{REDACTED}{mark}")
            start = value.end()
    return _HEADER.sub(_header_without_secret, "".join(parts) + text[start:])


def _header_without_secret(found: re.Match[str]) -> str:
    kept, other = found[1] or found[2] or found[4], found[4]
    return f"{kept}{REDACTED}" if not other or is_secret(kept.partition(":")[0].strip("'\"")) else found[0]


def redact_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of a command without the values of secret options (``--site.api_key VALUE``,
    ``--a.password=VALUE``), values that contain a secret (an inline table, a URL), and secrets in other strings."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        # Only a name is one of an option or variable: text, such as a URL with a query, has an equals sign too.
        assigned = re.fullmatch(r"(-{0,2}\w[\w.-]*)=(.*)", argument, re.DOTALL)
        if hide and not argument.startswith("--"):
            shown.append(REDACTED)
        elif assigned is None:
            shown.append(_argument(argument))
        else:
            shown.append(f"{assigned[1]}={REDACTED if is_secret(assigned[1]) else _argument(assigned[2])}")
        hide = argument.startswith("-") and assigned is None and is_secret(argument)
    return shown


def _argument(text: str) -> str:
    """Return one value without passwords. A table or an array that contains a secret is removed completely."""
    if text.lstrip().startswith(("{", "[")):
        from titan_core.api.config.toml import BadToml, parse_toml

        try:
            value = parse_toml(f"value = {text}")
        except BadToml:
            return redact_text(text)
        return text if redact(value) == value else REDACTED
    return redact_text(text)
