"""``docs/security.md`` names a test for each of its claims."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_each_row_of_a_table_about_files_or_secrets_names_a_test() -> None:
    claims = PAGE[PAGE.index("## Files of others") : PAGE.index("## Known limits")]
    rows = [line for line in claims.splitlines() if line.startswith("| ")]
    headers = [line for line in rows if line.startswith(("| threat", "| claim", "| ---"))]
    assert len(rows) > 20
    assert [row for row in rows if row not in headers and "::test_" not in row] == []


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_named_test_exists(file: str, test: str) -> None:
    functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert not test or test in functions
