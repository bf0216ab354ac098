"""The config section of titan-int8-qat."""

from typing import ClassVar

from pydantic import Field

from titan_core.api import Section


class Int8QATSection(Section):
    section: ClassVar[str] = "int8_qat"

    enable: bool = False
    """Round the weights of linear layers whenever they are used."""
    bits: int = Field(default=8, ge=2, le=8)
    """Number of bits of the integers."""
