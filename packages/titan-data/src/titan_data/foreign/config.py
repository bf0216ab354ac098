"""Config sections of the foreign formats that do not say all that is needed to read them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from titan_core.api import Section

IdType = Literal["auto", "uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


class MdsSection(Section):
    section: ClassVar[str] = "mds"

    column: str = ""
    """Column with the token ids. Default: the only one that has arrays of integers, or is named tokens or input_ids."""
    dtype: IdType = "auto"
    """Type of the ids in a column of plain bytes, which does not record it."""


class FlatTokensSection(Section):
    section: ClassVar[str] = "flat_tokens"

    dtype: IdType = "auto"
    """Type of the ids in files without a header. Files with one (written by numpy.save or by llm.c) record it."""
    end_token_id: int | None = Field(default=None, ge=-1, lt=2**32)
    """Id of the token that ends each document (50256 for GPT-2's); -1: the files are one stream without such a token."""


class InputIdsSection(Section):
    section: ClassVar[str] = "input_ids"

    column: str = Field(default="input_ids", min_length=1)
    """Column with the token ids of a document."""
