"""``titan data inspect --cost``: the bytes and requests of an order, beside a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.jobs import make_job
from titan_core.cli.main import main
from titan_data.read_cost import ReadCost, read_costs


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "corpus.jsonl"
    file.write_text((json.dumps({"text": "x" * 1011}) + "\n") * 6400)  # 1 KiB each
    return file


def cost(corpus: Path, shuffle: str) -> ReadCost:
    settings = {"training.dataset": "json", "training.dataset_path": str(corpus), "data.shuffle": shuffle}
    job = make_job("tiny", {**settings, "training.global_batch_size": 8, "training.local_batch_size": 8})
    (found,) = read_costs(job).values()
    return found


def test_each_order_has_its_cost(corpus: Path) -> None:
    assert corpus.stat().st_size == 6400 * 1024
    documents, blocks = cost(corpus, "documents"), cost(corpus, "blocks")
    assert documents.useful == 6400 * 1024, "each shard has 800, all of which are counted"
    assert documents.read / documents.useful == pytest.approx(4, abs=0.02), "each is a quarter of a page"
    assert documents.requests == pytest.approx(6400, rel=0.01)
    assert blocks.useful == 6400 * 1024
    assert blocks.requests == pytest.approx(6400 / 12, rel=0.02), "64 blocks of 12 records for each of 8 shards"
    assert blocks.read / blocks.useful == 1, "a block is three pages"
    assert ReadCost().figures == {"bytes_per_useful_byte": None, "requests_per_useful_mib": None}


def test_inspect_prints_it(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "inspect", "tiny", "--training.dataset", "json", "--training.dataset_path", str(corpus), "--cost"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)["cost"]["json"]
    assert figures["bytes_per_useful_byte"] > 3.5
    assert main([*arguments, "--data.shuffle", "none"]) == 0
    assert "json, data.shuffle = 'none': " in capfd.readouterr().out
    assert main(["data", "inspect", "tiny", "--cost"]) == 0
    assert "the cost of reading is not known" in capfd.readouterr().out
