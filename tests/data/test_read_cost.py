"""``titan data inspect --cost``: the bytes and requests of an order, beside a count by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_core.cli.main import main
from titan_data.read_cost import ReadCost, read_costs
from titan_testing.jobs import make_job


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "corpus.jsonl"
    file.write_text((json.dumps({"text": "x" * 1011}) + "\n") * 6400)  # 1 KiB each
    return file


def cost(corpus: Path, shuffle: str, dataset: str = "json") -> ReadCost:
    settings = {"training.dataset": dataset, "training.dataset_path": str(corpus), "data.shuffle": shuffle}
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


@pytest.mark.full
def test_a_document_of_a_parquet_file_costs_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    from titan_data import read_cost, row_groups

    monkeypatch.setenv("TITAN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{number:06d}" + "x" * 1018 for number in range(6400)], "more": [0] * 6400})
    pyarrow.parquet.write_table(table, file, row_group_size=100, compression="none", use_dictionary=False)
    kept = cost(file, "documents", "parquet")
    assert kept.requests == 64 and kept.read / kept.useful == pytest.approx(1, abs=0.1), "all groups stay decoded"
    assert cost(file, "none", "parquet").read == pytest.approx(kept.read, rel=0.1)
    monkeypatch.setattr(read_cost, "_KEPT", 250_000)  # two groups
    documents, blocks, none = (cost(file, shuffle, "parquet") for shuffle in ("documents", "blocks", "none"))
    assert documents.read / documents.useful == pytest.approx(100, rel=0.1), "a group of 100 documents for each"
    assert blocks.read / blocks.useful < 15, "a group, or two, for each block of 12 documents"
    assert none.read / none.useful == pytest.approx(8, rel=0.1), "each of the eight shards reads all groups, if it is alone"
    monkeypatch.setattr(row_groups, "PART", 20_000)
    monkeypatch.setattr(row_groups, "LIMIT", 250_000)
    dataset = ["--training.dataset", "parquet", "--training.dataset_path", str(file)]
    assert main(["data", "inspect", "tiny", *dataset, "--cost"]) == 0
    printed = capfd.readouterr().out
    assert "parquet: 1 files of Parquet, 6,400 rows; of the columns that are read ('text'), a group has up to " in printed
    assert "a document at random costs the decoding of half of its group of rows (up to " in printed
    assert 'set data.shuffle = "blocks", write smaller groups' in printed
    assert "parquet, data.shuffle = 'documents': " in printed


def test_inspect_prints_it(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "inspect", "tiny", "--training.dataset", "json", "--training.dataset_path", str(corpus), "--cost"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)["cost"]["json"]
    assert figures["bytes_per_useful_byte"] > 3.5
    assert main([*arguments, "--data.shuffle", "none"]) == 0
    assert "json, data.shuffle = 'none': " in capfd.readouterr().out
    assert main(["data", "inspect", "tiny", "--cost"]) == 0
    assert "the cost of reading is not known" in capfd.readouterr().out
