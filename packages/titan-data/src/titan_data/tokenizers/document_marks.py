"""Determines which tokens mark the begin and end of a document from the files of a Hugging Face tokenizer.

Several files may define these tokens, and may contradict each other. The order of precedence is:

1. ``bos_token`` and ``eos_token`` (:mod:`titan_data.tokenizers.folder`). ``add_bos_token = false`` means no begin token,
   unless the post-processor adds some, which decides in ``transformers`` too. ``add_eos_token`` is ignored: it concerns
   prompts, which do not end.
2. The tokens that the post-processor of ``tokenizer.json`` adds to a text. If it adds the named token and others, all count.
3. If no file defines them, tokens with usual names.

A token that is both ``bos_token`` and ``eos_token`` (GPT-2) only ends documents, unless the tokenizer adds it before texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_data.tokenizers.folder import CONFIG, SPECIAL_TOKENS, TokenizerFolder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
POST_PROCESSOR = f"the post-processor of {TOKENIZER}"

_BEGINS = ("<|begin_of_text|>", "<s>", "[CLS]", "<bos>")
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "[SEP]", "<eos>")
DOWNLOAD = "`titan tokenizer download OWNER/NAME` downloads a tokenizer"
"""Ends the fix for a missing or damaged file."""
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


def document_marks(tokenizer: Tokenizer, folder: TokenizerFolder) -> DocumentMarks:
    """Return the marks of ``tokenizer``, whose files are those of ``folder``.

    Raises:
        UserError: a file is damaged.
    """
    before, after = _added(tokenizer)
    end = _choose(_named(folder, tokenizer, "eos_token"), after) or _by_name(tokenizer, _ENDS)
    adds_begin = folder.flag("add_bos_token")
    named = _named(folder, tokenizer, "bos_token")
    if adds_begin is False and not before:
        return DocumentMarks(Marks((), f"add_bos_token in {CONFIG}"), end)
    if named is not None and named.ids and named.ids == end.ids and not before and not adds_begin:
        return DocumentMarks(Marks((), f"{named.source}: the same token ends documents"), end)
    return DocumentMarks(_choose(named, before) or _by_name(tokenizer, _BEGINS), end)


def _named(folder: TokenizerFolder, tokenizer: Tokenizer, role: str) -> Marks | None:
    """Return the token with the given role; without ids if a file sets it to null, ``None`` if no file mentions it."""
    order = (SPECIAL_TOKENS, CONFIG) if folder.legacy else (CONFIG, SPECIAL_TOKENS)
    found = [(name, tuple(ids)) for name in order if (ids := folder.ids_in(name, role)) is not None]
    if role not in folder.named:
        return None
    contradictions = [f"{name} says {_shown(ids)}" for name, ids in found[1:] if ids and ids != found[0][1]]
    token = folder.named[role]
    if token is None:
        return Marks((), found[0][0], ", and ".join(contradictions))
    number = tokenizer.token_to_id(token)
    assert number is not None
    if token in folder.added:
        contradictions.append(f"{TOKENIZER} lacks it")
    elif folder.id_in_decoder(token) not in (None, number):
        contradictions.append(f"added_tokens_decoder gives it the id {folder.id_in_decoder(token)}")
    return Marks((number,), found[0][0], ", and ".join(contradictions))


def _choose(named: Marks | None, added: _Ids) -> Marks | None:
    """Combine the token that config files name with those that the post-processor adds; ``None`` if there are neither."""
    if named is None:
        return Marks(added, POST_PROCESSOR) if added else None
    if not added or added == named.ids:
        return named
    if named.ids and named.ids[0] in added:
        return Marks(added, f"{named.source}, and {POST_PROCESSOR}", named.contradiction)
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
