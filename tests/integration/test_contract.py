"""The recorded contract of ``titan_core.api``."""

from __future__ import annotations

from ci import contract


def test_the_record_of_the_contract_is_current() -> None:
    stale = "the contract has changed: raise API_VERSION if plugins can notice, then run `uv run python -m ci.contract`"
    assert contract.FILE.read_text(encoding="utf-8") == contract.render(), stale
