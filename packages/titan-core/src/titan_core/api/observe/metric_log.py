"""The metrics of a logged step."""

from __future__ import annotations

from collections.abc import Mapping

Record = Mapping[str, float | int | None]
"""``step`` and metrics by name, for one logged step or one validation (which has ``validation_loss``, or
``validation_loss/NAME``, but no ``loss``).
``None``: the value is unknown or not finite."""
