"""Branches of a run with stages: they keep the stages, and begin in the one in which the checkpoint was saved."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from harness.hand_read import documents_of
from harness.staged import run_staged, write_recipe
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

AT = 6
"""A step within the second stage, with other sequences, another batch and another RoPE base than the first one."""
MIXTURE = (
    '[{name = "books", dataset = "json", dataset_path = "books.jsonl"}, '
    '{name = "web", dataset = "json", dataset_path = "web.jsonl"}]'
)


def branch(to: str, *overrides: str) -> int:
    return main(["run", "branch", "outputs/staged", "--at", str(AT), "--to", to, *overrides])


@pytest.mark.full
def test_a_branch_goes_on_in_the_stage_of_its_checkpoint(
    in_tmp: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(in_tmp)
    caplog.set_level(logging.INFO)
    whole = run_staged(str(in_tmp), {"checkpoint.interval": AT})
    changes = [record.getMessage() for record in caplog.records if "model.args" in record.getMessage()]
    assert [text.partition(": model.args")[2] for text in changes] == [".rope_theta: 10000.0 -> 50000.0"]

    assert branch("same") == 0
    same = run_recipe("same/config.toml")
    assert same.losses == whole.losses[AT:] and len(same.losses) == 12 - AT

    # An override holds until a stage sets the key itself: the third one has a mixture of its own.
    assert branch("other", "--data.mixture", MIXTURE) == 0
    other = run_recipe("other/config.toml")
    assert len(other.losses) == 12 - AT and other.losses[0] != whole.losses[AT]
    assert {one["dataset"] for one in documents_of(capsys, in_tmp / "other", AT + 1)} == {"books", "web"}
