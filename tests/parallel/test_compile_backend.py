"""``compile.backend`` selects among the backends that torch knows, and names no code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_testing.jobs import run_recipe


@pytest.mark.parametrize("name", ["evil_module:owned", "evil_module", "eagre"])
def test_an_unknown_backend_is_refused_and_not_imported(in_tmp: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (in_tmp / "evil_module.py").write_text("def owned(graph, inputs): return graph\n")
    monkeypatch.syspath_prepend(str(in_tmp))
    with pytest.raises(UserError, match=r"compile\.backend.*: torch has no such backend; "):
        run_recipe("tiny", {"compile.enable": "true", "compile.backend": name, "training.steps": 1, "job.device": "cpu"})
    assert "evil_module" not in sys.modules
