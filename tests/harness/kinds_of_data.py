"""The kinds of data in docs/data/kinds.md: each writes raw files, and gives the settings to read
them."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import zstandard

from harness.chat_model import TEMPLATE, save_tokenizer
from harness.letters import BYTE

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
TEXTS: list[str] = json.loads((FOREIGN / "texts.json").read_text())
IDS = [[*text.encode(), 257] for text in TEXTS]
PAIRS = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}."} for n in range(24)]
Make = Callable[[Path], dict[str, object]]
"""Writes the raw files into a folder; returns the settings of the recipe, with paths relative to it."""


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def files(dataset: str, path: str = "data", **contents: str | bytes) -> Make:
    """``contents``: of each file below ``data``, by a name in which ``__`` stands for a dot."""

    def make(folder: Path) -> dict[str, object]:
        for name, content in contents.items():
            file = folder / "data" / name.replace("__", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return {"training.dataset": dataset, "training.dataset_path": path}

    return make


def also(make: Make, **settings: object) -> Make:
    """``settings``: keys in which ``__`` stands for a dot."""
    return lambda folder: {**make(folder), **{key.replace("__", "."): value for key, value in settings.items()}}


RECORDS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
RAW = lines(RECORDS).encode()
BOOK = "\n".join(TEXTS * 40)


def tables(*columns: dict[str, list[Any]], **options: Any) -> Make:
    """Write a Parquet file for each dictionary of columns; ``options`` are those of ``write_table``."""

    def make(folder: Path) -> dict[str, object]:
        import pyarrow
        import pyarrow.parquet

        (folder / "data").mkdir()
        for number, one in enumerate(columns):
            pyarrow.parquet.write_table(pyarrow.table(one), folder / "data" / f"part-{number}.parquet", **options)
        return {"training.dataset": "parquet", "training.dataset_path": "data"}

    return make


def arrow_table(new: str, **options: Any) -> Make:
    """``new``: the function of ``pyarrow.ipc`` that writes the file; ``options``: of its buffers."""

    def make(folder: Path) -> dict[str, object]:
        import pyarrow

        table = pyarrow.Table.from_pylist(RECORDS)
        (folder / "data").mkdir()
        options_of = pyarrow.ipc.IpcWriteOptions(**options)
        with getattr(pyarrow.ipc, new)(str(folder / "data" / "a.arrow"), table.schema, options=options_of) as writer:
            writer.write_table(table, max_chunksize=5)
        return {"training.dataset": "arrow", "training.dataset_path": "data"}

    return make


def chat_tables(folder: Path) -> dict[str, object]:
    """Lists of structs, in several row groups."""
    save_tokenizer(folder / "tokenizer", TEMPLATE)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = tables({"messages": [chat] * 24, "source": ["x"] * 24}, row_group_size=5)(folder)
    return {**made, "training.dataset": "chat", "model.tokenizer": "hf", "model.tokenizer_path": "tokenizer",
            "data.document_mask": "true"}  # fmt: skip


def arrow(folder: Path) -> dict[str, object]:
    import datasets

    datasets.Dataset.from_list(RECORDS).save_to_disk(str(folder / "data"))
    return {"training.dataset": "arrow", "training.dataset_path": "data"}


def split_folder(folder: Path) -> dict[str, object]:
    import datasets

    table = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(folder / "data"))
    return {"training.dataset": "arrow", "training.dataset_path": "data", "training.dataset_split": "train"}


def table_text(rows: list[dict[str, str]], separator: str) -> str:
    import io

    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def chats(records: list[Any], template: str | None = TEMPLATE, name: str = "chats.jsonl", **settings: object) -> Make:
    def make(folder: Path) -> dict[str, object]:
        save_tokenizer(folder / "tokenizer", template)
        is_table = name.endswith(".csv")
        content = table_text(records, ",") if is_table else lines(records)
        (folder / name).write_text(content, encoding="utf-8", newline="")
        return {"training.dataset": "chat", "training.dataset_path": name, "model.tokenizer": "hf",
                "model.tokenizer_path": "tokenizer", "data.document_mask": "true", **settings}  # fmt: skip

    return make


def foreign(dataset: str, path: str, **settings: object) -> Make:
    return also(lambda folder: {"training.dataset": dataset, "training.dataset_path": str(FOREIGN / path)}, **settings)


def flat(name: str, header: bytes = b"", numpy_file: bool = False, **settings: object) -> Make:
    def make(folder: Path) -> dict[str, object]:
        ids = numpy.concatenate([numpy.array(one, numpy.uint16) for one in IDS])
        if numpy_file:
            numpy.save(folder / name, ids)
        else:
            (folder / name).write_bytes(header + ids.tobytes())
        return {"training.dataset": "flat_tokens", "training.dataset_path": name, "flat_tokens.end_token_id": 257}

    return also(make, **settings)


def llm_c(folder: Path) -> dict[str, object]:
    header = numpy.zeros(256, numpy.int32)
    header[:3] = 20240520, 1, sum(map(len, IDS))
    return flat("fineweb_train_000001.bin", header.tobytes())(folder)


def tokenised(folder: Path) -> dict[str, object]:
    from titan_data.tokenized import Part, TokenizedIndex

    (folder / "tokens").mkdir()
    numpy.concatenate([numpy.array(one, "<u2") for one in IDS]).tofile(folder / "tokens" / "part-00000.bin")
    numpy.cumsum([len(one) for one in IDS], dtype="<i8").tofile(folder / "tokens" / "part-00000.idx")
    part = Part("part-00000", len(IDS), sum(map(len, IDS)))
    TokenizedIndex("<u2", "byte", BYTE.fingerprint(), (part,)).write(folder / "tokens")
    return {"training.dataset": "tokenized", "training.dataset_path": "tokens"}


ANSWER = {"role": "assistant", "content": "b"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
WITH_TOOLS = TEMPLATE.replace("<|eot|>", "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|eot|>", 1)
MIXED = "[{dataset = 'json', dataset_path = 'data/a.jsonl', weight = 0.5}, {dataset = 'csv', dataset_path = 'data/b.csv'}]"

KINDS: dict[str, Make] = {
    "JSON lines": files("json", "data/a.jsonl", a__jsonl=RAW),
    "JSON lines, another field": also(
        files("json", "data/*.jsonl", a__jsonl=lines([{"body": text} for text in TEXTS])), data__text_field="body"
    ),
    "JSON lines, several fields": also(
        files("json", a__jsonl=lines(PAIRS)), data__format="Question: {{ question }}\nAnswer: {{ answer }}"
    ),
    "JSON lines, records of other fields": files(
        "json", a__jsonl=lines([{"text": "a text", "url": "u"}] * 20), b__jsonl=lines([{"score": 1, "text": "a text"}] * 20)
    ),
    "a JSON array": files("json", "data/a.json", a__json=json.dumps(RECORDS)),
    "`.jsonl.gz`": files("json", a__jsonl__gz=gzip.compress(RAW)),
    "`.jsonl.zst`": files("json", a__jsonl__zst=zstandard.compress(RAW)),
    "`.jsonl.xz`": files("json", a__jsonl__xz=lzma.compress(RAW)),
    "`.jsonl.bz2`": files("json", a__jsonl__bz2=bz2.compress(RAW)),
    "Parquet": tables({"text": TEXTS}),
    "Parquet, files of other columns": tables({"text": TEXTS, "url": TEXTS}, {"score": [1.0] * 12, "text": TEXTS}),
    "Parquet, several row groups, snappy": tables({"id": TEXTS, "text": TEXTS}, row_group_size=5, compression="snappy"),
    "Parquet, several row groups, zstd": tables({"text": TEXTS, "id": TEXTS}, row_group_size=3, compression="zstd"),
    "Arrow, `Dataset.save_to_disk`": arrow,
    "Arrow, a stream": arrow_table("new_stream"),
    "Arrow, a file": arrow_table("new_file"),
    "Arrow, a compressed file (Feather)": arrow_table("new_file", compression="lz4"),
    "splits, `DatasetDict.save_to_disk`": split_folder,
    "CSV": files("csv", a__csv=table_text([{"text": text, "n": "1"} for text in TEXTS], ",")),
    "TSV": files("csv", a__tsv=table_text([{"text": f'"{text}"\n', "n": "1"} for text in TEXTS], "\t")),
    "text files": files("text", a__txt=TEXTS[0] * 9, b__md=TEXTS[1] * 9, c__txt=TEXTS[2] * 9, d__txt=TEXTS[3] * 9),
    "a book": files("text", "data/book.txt", book__txt=BOOK),
    "a text shorter than the logical shards": also(
        files("text", "data/a.txt", a__txt=TEXTS[0] * 9), training__global_batch_size=16
    ),
    "a mixture": also(
        files("json", a__jsonl=RAW, b__csv=table_text([{"text": text} for text in TEXTS], ",")),
        data__mixture=MIXED, training__dataset_path="",
    ),
    "chats: messages": chats([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 24),
    "chats: contents in parts": chats(
        [{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]}] * 24
    ),
    "chats: ShareGPT": chats([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 24),
    "chats: Alpaca": chats([{"instruction": "Add.", "input": "1, 2", "output": "3"}] * 24),
    "chats: question and answer": chats(PAIRS),
    "chats: Parquet": chat_tables,
    "chats: CSV": chats(PAIRS, name="chats.csv"),
    "chats: prompt and completion without a template": chats(
        [{"prompt": "2 + 2 =", "completion": " 4"}] * 24, None, **{"chat.template": "none"}
    ),
    "chats: other names of fields": chats(
        [{"ask": "a", "say": "b"}] * 24, **{"chat.prompt": "ask", "chat.completion": "say"}
    ),
    "chats: calls of tools": chats([{"messages": [{"role": "user", "content": "a"}, CALL]}] * 24, WITH_TOOLS),
    "`titan data tokenize`": tokenised,
    "Megatron-LM": foreign("megatron", "megatron_uint16"),
    "MosaicML's streaming (MDS)": foreign("mds", "mds_int32"),
    "datatrove, nanotron": foreign("datatrove", "datatrove_uint16.ds"),
    "nanoGPT": flat("train.bin", flat_tokens__dtype="uint16"),
    "llm.c": llm_c,
    "OLMo": flat("part-0-00000.npy", flat_tokens__dtype="uint16"),
    "`numpy.save`": flat("tokens.npy", numpy_file=True),
    "`datasets` with `input_ids`": also(tables({"input_ids": IDS}), training__dataset="input_ids"),
}  # fmt: skip
