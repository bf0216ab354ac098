"""Each kind of data in docs/data/kinds.md is read from raw files and trained on for a step, and is
the same stream on any number of ranks and after any interruption."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ci.workspace import ROOT
from harness.kinds_of_data import KINDS
from harness.loaders import close, global_batch, merged, plan
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.data.loader import DataLoader
from titan_core.data.streams import open_sources
from titan_testing.jobs import make_job, run_job

TINY: dict[str, object] = {
    "model.args": "{dim = 16, n_layers = 1, n_heads = 1, n_kv_heads = 1, ffn_dim = 16}", "training.seq_len": 128,
    "training.local_batch_size": 4, "training.global_batch_size": 4, "training.steps": 1, "metrics.enable_console": "false",
    "job.device": "cpu",
}  # fmt: skip
QUICK = {"JSON lines", "a text shorter than the logical shards", "chats: Alpaca", "Megatron-LM", "CSV"}


WITH_WORKERS = {"JSON lines", "a book", "`titan data tokenize`"}
"""Rows that read in other processes once, which are slow to start."""
ROWS = [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.full) for kind in KINDS]


def job_of(kind: str, folder: Path, **more: object) -> AssembledJob:
    made = {key: value for key, value in KINDS[kind](folder).items() if value != ""}
    if "data.mixture" in made:
        del made["training.dataset"]
    return make_job("tiny", {**TINY, **made, **{key.replace("__", "."): value for key, value in more.items()}})


@pytest.fixture(autouse=True)
def cache(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(in_tmp / "cache"))


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize("kind", ROWS)
def test_raw_files_are_trained_on(kind: str, in_tmp: Path) -> None:
    record = run_job(job_of(kind, in_tmp))
    assert len(record.losses) == 1 and math.isfinite(record.losses[0]) and record.targets[0] > 0


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("kind", ROWS)
def test_the_stream_is_the_same_on_any_mesh_and_after_ten_interruptions(kind: str, packing: str, in_tmp: Path) -> None:
    job = job_of(kind, in_tmp, data__packing=packing, data__packing_window=3, training__global_batch_size=8)
    generator = random.Random(f"{kind} {packing}")
    # Worker processes are slow to start.
    workers = (
        2 if kind in ("JSON lines", "Megatron-LM", "a book", "`titan data tokenize`") and packing == "concatenate" else 0
    )

    def division(ranks: int, workers: int = 0) -> list[DataLoader]:
        spec = replace(job.data, plan=plan(ranks, seq_len=128))
        return [DataLoader(spec, open_sources(spec), job.text_tokenizer, rank, workers=workers) for rank in range(ranks)]

    uninterrupted, current = division(1), division(2)
    for number in range(10):
        for _ in range(generator.randrange(4)):
            batch = global_batch(uninterrupted)
            assert batch is not None and batch == global_batch(current)
        state = merged(current)
        close(current)
        current = division(generator.choice([1, 2, 4, 8]), workers if number == 5 else 0)
        for loader in current:
            loader.load_state_dict(state)
    assert global_batch(uninterrupted) == global_batch(current)
    close(uninterrupted, current)


def test_the_page_lists_these_kinds() -> None:
    page = (ROOT / "docs" / "data" / "kinds.md").read_text(encoding="utf-8")
    section = page.partition("## From raw files to a step\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)[2:]
    assert listed == list(KINDS) and len(listed) >= 25
