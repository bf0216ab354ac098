"""Hugging Face tokenizers (``tokenizer.json``), read by ``tokenizers``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_core.api import ChatTokenizer, RenderedChat, TokenizerContext, UserError
from titan_core.api.data.tokenizer import Message, without_surrogates
from titan_core.toolkit.files import LONGEST_TABLE, read_bytes
from titan_data.template_process import TemplateStopped
from titan_data.tokenizers.chat_template import ChatTemplate
from titan_data.tokenizers.document_marks import DOWNLOAD, TOKENIZER, document_marks
from titan_data.tokenizers.folder import TokenizerFolder

if TYPE_CHECKING:
    import datetime

    from tokenizers import Tokenizer


_PROBE = "a message of the assistant"
_SPACED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class HuggingFaceTokenizer(ChatTokenizer):
    """A ``tokenizers.Tokenizer`` with the tokens that mark documents."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        """
        Args:
            folder: where the tokenizer's files are (:mod:`titan_data.tokenizers.folder`).

        Raises:
            UserError: one of them is damaged, or cannot be resolved.
        """
        files = TokenizerFolder(tokenizer, folder)
        # A tokenizer may have been saved with truncation or padding for a model's inputs. Documents need neither.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # "<|end_of_text|>" in the text of a document does not end it.
        tokenizer.encode_special_tokens = True
        self._tokenizer, self._folder = tokenizer, folder
        self._template: ChatTemplate | None = None
        self._special_tokens = {role: token for role, token in files.named.items() if token is not None}
        self._splits, self._cleans = bool(files.flag("split_special_tokens")), _cleans(tokenizer, files)
        self._marks = document_marks(tokenizer, files)
        self._begin, self._end = list(self._marks.begin.ids), list(self._marks.end.ids)
        self._vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return self._vocab_size

    def marks(self) -> tuple[list[int], list[int]]:
        """The tokens that begin and that end a document."""
        return self._begin, self._end

    def describe_special_tokens(self) -> list[str]:
        """Describe the begin and end tokens, the file that defines them, and any file that contradicts it; one line each."""
        lines = []
        for verb, marks in (("begin", self._marks.begin), ("end", self._marks.end)):
            names = " ".join(f"{self._tokenizer.id_to_token(token)!r} ({token})" for token in marks.ids) or "no token"
            lines.append(f"documents {verb} with {names}: {marks.source}")
            if marks.contradiction:
                lines[-1] += f" (but {marks.contradiction})"
        return lines

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of ``text`` between the begin and end tokens."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # for surrogates; which of the two depends on the version
            ids = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids
        return [*self._begin, *ids, *self._end]

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of ``text``. Names of special tokens stand for those tokens."""
        self._tokenizer.encode_special_tokens = self._splits
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # for surrogates, as above
            ids = self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids
        finally:
            self._tokenizer.encode_special_tokens = True
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
    ) -> RenderedChat:
        """See :class:`titan_core.api.ChatTokenizer`."""
        return self._chat_template().render(messages, add_generation_prompt, tools, date)

    def render_prefixes(
        self,
        messages: Sequence[Message],
        prefixes: Sequence[tuple[int, bool]],
        tools: Sequence[Any] | None = None,
        date: datetime.date | None = None,
    ) -> tuple[RenderedChat, Iterable[str]]:
        """See :class:`titan_core.api.ChatTokenizer`."""
        return self._chat_template().render_prefixes(messages, prefixes, tools, date)

    def require_chat_template(self) -> None:
        """See :class:`titan_core.api.ChatTokenizer`."""
        self._chat_template()

    def _chat_template(self) -> ChatTemplate:
        if self._folder is None:
            why = f"a chat template is found only beside a file named {TOKENIZER}"
            raise UserError.one("model.tokenizer_path", why, f"rename the tokenizer to {TOKENIZER}")
        if self._template is None:
            self._template = ChatTemplate.read(self._folder, self._special_tokens)
        return self._template

    @cached_property
    def turn_end_ids(self) -> list[int]:
        """The first special token behind the content of a message of the assistant, or ``eos_token`` if it follows there at
        once, as after Cohere's ``<|END_RESPONSE|>``; none if there is no template, or it writes none."""
        question = {"role": "user", "content": "a"}
        chat = [question, {"role": "assistant", "content": _PROBE}, question]
        try:
            texts = [self.render_chat(chat[:number], add_generation_prompt=False).text for number in (2, 3)]
        except TemplateStopped:
            raise
        except UserError:
            return []
        special = {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        behind, followed = (self.encode_with_special_tokens(text.partition(_PROBE)[2]) for text in texts)
        # A token that is there only if nothing follows ends the chat.
        shared = takewhile(lambda both: both[0] == both[1] and both[0] in special, zip(behind, followed, strict=False))
        end = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return [token for token, _ in shared if token == end][:1] or [token for token in behind if token in special][:1]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        for piece in _SPACED if self._cleans else ():
            text = text.replace(piece, piece.replace(" ", ""))
        return text


def _cleans(tokenizer: Tokenizer, files: TokenizerFolder) -> bool:
    """Whether spaces before punctuation are removed from decoded texts. As in ``transformers``, BPE needs a second key."""
    by_force = files.flag("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    return bool(files.flag("clean_up_tokenization_spaces")) and (bool(by_force) or type(tokenizer.model).__name__ != "BPE")


def build(context: TokenizerContext[None]) -> HuggingFaceTokenizer:
    """Read ``context.path``, a ``tokenizer.json`` or the folder that contains one, and the config files next to it.

    Raises:
        UserError: the file does not exist or is not a tokenizer, or a config file is damaged.
    """
    if context.path is None:
        why = "tokenizer 'hf' needs the path to a tokenizer.json"
        raise UserError.one("model.tokenizer_path", why, f"set it; {DOWNLOAD}")
    from tokenizers import Tokenizer

    given = Path(context.path).expanduser()
    file = given / TOKENIZER if given.is_dir() else given
    if not file.is_file():
        raise UserError.one(str(file), "no such file", f"check the path; {DOWNLOAD}", missing=True)
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(file, longest=LONGEST_TABLE, inside=given if given.is_dir() else None))
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        raise UserError.one(str(file), why, f"name a file that can be; {DOWNLOAD}") from None
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for a file that it cannot parse
        raise UserError.one(
            str(file), f"not a tokenizer.json: {error}", f"name the tokenizer.json of a Hugging Face tokenizer; {DOWNLOAD}"
        ) from None
    # A file with another name may be one of several, and the config files may belong to another of them.
    return HuggingFaceTokenizer(tokenizer, file.parent if file.name == TOKENIZER else None)
