"""The config section of dataset ``chat``."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from titan_core.api import Section


class ChatSection(Section):
    section: ClassVar[str] = "chat"

    train_on: Literal["all", "last"] = "all"
    """Messages of the assistant to train on: all of a chat, or the last one. All other tokens are context without a loss."""
    template: Literal["tokenizer", "none"] = "tokenizer"
    """Render records by the chat template beside the tokenizer, or not: the text is then the prompt followed by the
    completion, between the tokens that mark documents, and records of messages are refused."""
    too_long: Literal["drop", "truncate", "stop"] = "drop"
    """Action for a record that does not fit into a sequence: skip it, cut off its end, or stop. Skipped and cut records are
    counted and logged."""
    messages: str = ""
    """Field with the list of messages. Default: messages, conversations or conversation, if a record has it."""
    role: str = ""
    """Key of a message's role. Default: role, or from."""
    content: str = ""
    """Key of a message's text. Default: content, or value."""
    prompt: str = ""
    """Field with the prompt, for records of pairs. Default: prompt, instruction, question, query or input, with the field of
    the completion that belongs to it. `titan data inspect` shows which fields were found."""
    completion: str = ""
    """Field with the completion. Default: completion, response, output or answer."""
    context: str = ""
    """Field whose text, if any, follows the prompt after an empty line. Default: input or context, beside instruction."""
    system: str = ""
    """Field with the system message. Default: system or system_prompt, if a record has it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.messages and (self.prompt or self.completion or self.context):
            raise ValueError("chat.messages names a list of messages, and chat.prompt a pair: set one of them")
        if bool(self.prompt) != bool(self.completion):
            raise ValueError("chat.prompt and chat.completion must be set together")
        if self.context and not self.prompt:
            raise ValueError("chat.context needs chat.prompt and chat.completion")
        return self
