"""Removing secrets from output."""

from __future__ import annotations

from titan_core.api._secrets import (
    REDACTED as REDACTED,
    is_redacted as is_redacted,
    is_secret as is_secret,
    redact as redact,
    redact_arguments as redact_arguments,
    redact_text as redact_text,
)
