"""Provenance of a run whose stages, sources and batch change: the documents, tokenised by hand, are what was trained on."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harness.hand_read import byte_ids, line_of, rows_by_hand
from harness.staged import run_staged, write_recipe
from titan_core.api import hookimpl
from titan_core.cli.invocation import Invocation
from titan_core.plugins.registry import Components
from titan_data.provenance.documents import documents_of_step
from titan_data.provenance.recorded_run import open_run
from titan_data.provenance.steps import steps_of_document

STEPS = 18
CHANGED = '[{name = "books", dataset = "json", dataset_path = "books.jsonl", weight = 2.0}, ' \
    '{name = "code", dataset = "json", dataset_path = "code.jsonl"}]'  # fmt: skip
"""After step 12, unplanned: a source leaves, and one of the first stage comes back."""


class Stopped(Exception):
    pass


class Seen:
    """Records the inputs of each step, by row, and fails in one."""

    def __init__(self, fails_in: int | None) -> None:
        self.steps: dict[int, dict[int, list[int]]] = {}
        self._fails_in = fails_in

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        if update.step == self._fails_in:
            raise Stopped
        rows = self.steps[update.step] = {}
        for batch in update.microbatches:
            rows.update(zip(batch.rows.tolist(), batch.tokens.tolist(), strict=True))


def train(folder: Path, packing: str) -> dict[int, dict[int, list[int]]]:
    """Train three stages, killed in each, and another mixture and a larger batch after them."""
    more = {"data.packing": packing, "data.packing_window": 5, "checkpoint.interval": 3, "checkpoint.keep_latest_k": 2}
    seen: dict[int, dict[int, list[int]]] = {}
    for fails in (3, 7, 11, None):
        attempt = Seen(fails)
        try:
            run_staged(str(folder), more, (attempt,))
        except Stopped:
            assert fails is not None
        seen |= attempt.steps
    recipe = (folder / "staged.toml").read_text()
    begin = recipe.index("[[stages.data.mixture]]")
    (folder / "staged.toml").write_text(recipe[:begin] + f"[stages.data]\nmixture = {CHANGED}\n".replace("\n, ", ", "))
    allowed = '["data.mixture", "dataset.*.weight"]'
    attempt = Seen(None)
    run_staged(str(folder), {**more, "training.steps": STEPS, "checkpoint.allow_changed": allowed}, (attempt,))
    return seen | attempt.steps


@pytest.mark.full
@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_the_books_of_a_run_that_changes(in_tmp: Path, packing: str) -> None:
    write_recipe(in_tmp)
    seen = train(in_tmp, packing)
    assert sorted(seen) == list(range(1, STEPS + 1))
    opened = open_run(Invocation(Namespace(), Components.from_installed()), str(in_tmp / "outputs/staged"))
    assert [(segment.first, segment.last) for segment in opened.segments][:-1] == [(1, 4), (5, 8), (9, 12)]
    uses: dict[str | None, list[tuple[int, Any]]] = defaultdict(list)
    for step, rows in seen.items():
        documents = documents_of_step(opened, step)
        length = len(rows[0]) + 1
        by_hand = rows_by_hand([vars(one) for one in documents], length, lambda place: byte_ids(line_of(place)))
        assert [row[:-1] for row in by_hand] == [rows[number] for number in range(len(rows))], step
        for one in documents:
            uses[one.place].append((step, one))
    assert {one.dataset for found in uses.values() for _, one in found} == {"web", "code", "books"}
    for place in list(uses)[::9]:
        assert place is not None
        key = lambda use: (use[0], use[1].row, use[1].first_token)  # noqa: E731
        assert sorted(steps_of_document(opened, place), key=key) == sorted(uses[place], key=key), place
