"""Tokenised datasets equal their source. An unfinished one is resumed, and a damaged one is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from harness.letters import BYTE, letters, stream
from titan_core.api import BatchPlan, CorruptRecord, DatasetContext, Ref, ShuffledDocuments, TextTokenizer, UserError
from titan_core.api.data.dataset import DatasetSpec, ReadPolicy
from titan_core.cli.main import main
from titan_core.data.loader import DataLoader
from titan_core.data.tokens import TokenStream
from titan_core.toolkit.reading import DocumentReader
from titan_data.engines import LocalEngine
from titan_data.tokenize import PLAN as UNFINISHED, PartTask, tokenize
from titan_data.tokenized import INDEX, check_tokenized, open_tokenized, token_dtype
from titan_testing import PATIENCE
from titan_testing.jobs import make_job

PLAN = BatchPlan(4, 4, 1, 1, 4, 15)
LENGTHS = [1 + index * 11 % 37 for index in range(60)]


def make(folder: Path, parts: int = 7, workers: int = 1) -> list[Any]:
    spec = stream(letters(",".join(map(str, LENGTHS))), plan=PLAN)
    return list(tokenize(spec, spec.datasets[0], "byte", folder, parts, LocalEngine(workers)))


def request(folder: Path, tokenizer: str = "", vocab_size: int | None = None) -> DatasetContext[None]:
    where = "training.dataset_path"
    return DatasetContext(
        "tokenized", str(folder), "text", 0, where, tokenizer=tokenizer, vocab_size=vocab_size, section=None
    )


def test_every_document_is_stored_as_the_source_yields_it(tmp_path: Path) -> None:
    done = make(tmp_path / "tokens", workers=2)
    assert done[-1].parts == done[-1].of == 7
    assert done[-1].tokens == sum(LENGTHS) + 2 * len(LENGTHS)
    source = open_tokenized(request(tmp_path / "tokens", BYTE.fingerprint()))
    assert source.num_documents == len(LENGTHS)
    spec = letters(",".join(map(str, LENGTHS)))
    texts = [BYTE.encode_document(text).tolist() for text in spec.build.load()(spec.context).shard(0, 1, 0)]
    assert sorted(document.tolist() for document in source.shard(0, 1, 0)) == sorted(texts)
    assert json.loads((tmp_path / "tokens" / INDEX).read_text())["dtype"] == "<u2"
    training = DatasetSpec("tokenized", 1.0, Ref("titan_data.tokenized:open_tokenized"), request(tmp_path / "tokens"))
    loader = DataLoader(stream(training, plan=PLAN), [source], BYTE, 0, workers=1)
    step = loader.next_step()
    assert step is not None
    assert step.target_weight == 4 * 15
    loader.close()


def test_ids_take_two_bytes_if_the_vocabulary_allows() -> None:
    assert [token_dtype(size) for size in (256, 65_536, 65_537, 128_256)] == ["<u2", "<u2", "<u4", "<u4"]


def test_parts_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    first, second = (letters(",".join(map(str, LENGTHS)), seed=seed) for seed in (1, 2))
    for name, dataset in (("a", first), ("b", second)):
        list(tokenize(stream(dataset, plan=PLAN), dataset, "byte", tmp_path / name, 3, LocalEngine(1)))
    written = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert len(written[0]) == 7 and written[0] == written[1]


def test_an_interrupted_tokenisation_resumes(tmp_path: Path) -> None:
    make(tmp_path / "whole")
    made = tmp_path / "tokens"
    make(made)
    (made / INDEX).unlink()
    plan = {"dataset": "letters", "path": ",".join(map(str, LENGTHS)), "text_field": "text", "format": None,
            "tokenizer": BYTE.fingerprint(), "documents": len(LENGTHS), "parts": 7}  # fmt: skip
    (made / "plan.json").write_text(json.dumps(plan))
    # As if killed while writing part 3: its data exists without an index.
    (made / "part-00003.idx").unlink()
    (made / "part-00003.bin").rename(made / "part-00003.bin.0123.partial")
    untouched = (made / "part-00002.bin").stat().st_mtime_ns
    make(made)
    assert (made / "part-00002.bin").stat().st_mtime_ns == untouched
    assert {file.name: file.read_bytes() for file in made.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()
    }


def test_each_dataset_of_a_mixture_has_a_folder(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = '{{dataset = "letters", dataset_path = "{}", name = "{}"}}'
    mixture = f"[{letters.format('5,9', 'one')}, {letters.format('7', 'two')}]"
    assert main(["data", "tokenize", "tiny", "--data.mixture", mixture, "--output", "tokens", "--parts", "1"]) == 0
    *written, hint = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" in ")[2] for line in written] == ["tokens/one", "tokens/two"]
    assert hint.endswith("to its folder in each entry of data.mixture")
    entry = '{{dataset = "tokenized", dataset_path = "tokens/{0}", name = "{0}"}}'
    mixture = f"[{entry.format('one')}, {entry.format('two')}]"
    assert [one.name for one in make_job("tiny", {"data.mixture": mixture}).data.datasets] == ["one", "two"]


@pytest.mark.full
def test_a_killed_command_leaves_nothing_running_and_resumes(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "titan_core", "data", "tokenize", "tiny", "--output", "tokens", "--workers", "2", "--parts",
        "40",
    ]  # fmt: skip
    started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("tokens/*.idx")):
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert children
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    complete = len(list(tmp_path.glob("tokens/*.idx")))
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert complete < 40
    assert check_tokenized(request(tmp_path / "tokens")) == []
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "already contains a complete tokenised dataset" in again.stderr


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def truncate(folder: Path) -> None:
    file = folder / "part-00001.bin"
    file.write_bytes(file.read_bytes()[:-2])


def swap(folder: Path) -> None:
    ends = numpy.fromfile(folder / "part-00001.idx", "<i8")
    (ends + 1).tofile(folder / "part-00001.idx")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, r"part-00001\.bin: has \d+ bytes, but tokenized\.json says \d+ bytes: the index does not match"),
    "another index": (swap, r"part-00001\.idx: the last document ends at token \d+, but the data has \d+ tokens: the index"),
    "missing": (lambda folder: (folder / "part-00000.idx").unlink(), r"part-00000\.idx: is missing"),
    "no index": (lambda folder: (folder / INDEX).unlink(), r"not a complete tokenised dataset: tokenized\.json: No"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), r"tokenized\.json: damaged"),
    "another format": (
        lambda folder: (folder / INDEX).write_text('{"format": 9}'),
        r"has format version 9, but this titan-data reads version 1",
    ),
}


def with_field(key: str, value: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        contents = json.loads((folder / INDEX).read_text())
        (contents if key in contents else contents["parts"][0])[key] = value
        (folder / INDEX).write_text(json.dumps(contents))

    return spoil


DAMAGE |= {
    f"{key} {value!r}"[:40]: (with_field(key, value), r"tokenized\.json: damaged: ")
    for key, value in [
        ("dtype", "<f4"), ("dtype", "O"), ("dtype", 7), ("tokenizer", None), ("parts", 3), ("parts", {"a": 1}),
        ("parts", [{"name": "part-00000", "documents": 1}]), ("name", "../part-00000"), ("name", "/etc/passwd"), ("name", 5),
        ("documents", -1), ("documents", "9"), ("documents", True), ("tokens", 1.5), ("tokens", None),
    ]
}  # fmt: skip
DAMAGE["nested"] = (lambda folder: (folder / INDEX).write_text("[" * 100_000), r"tokenized\.json: damaged: ")


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "tokens")
    spoil, why = DAMAGE[damage]
    spoil(tmp_path / "tokens")
    with pytest.raises(UserError, match=why):
        open_tokenized(request(tmp_path / "tokens"))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "tokens")
    (problem,) = check_tokenized(request(tmp_path / "tokens", "another"))
    assert "tokenised by 'byte' with other token ids than this job's tokenizer produces" in str(problem)


def test_another_dataset_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "tokens")
    (tmp_path / "tokens" / INDEX).unlink()
    with pytest.raises(UserError, match="is not empty"):
        make(tmp_path / "tokens")
    (tmp_path / "tokens" / "plan.json").write_text(json.dumps({"dataset": "json", "parts": 7}))
    with pytest.raises(UserError, match="contains an unfinished tokenisation with other settings: dataset 'json'"):
        make(tmp_path / "tokens")


def test_ids_beyond_the_vocabulary_are_reported_with_their_file_and_document(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    make(folder, parts=2)
    ids, ends = numpy.fromfile(folder / "part-00001.bin", "<u2"), numpy.fromfile(folder / "part-00001.idx", "<i8")
    ids[ends[4] + 3] = 40_000  # token 3 of document 5, which is long enough
    assert ends[5] - ends[4] > 3
    ids.tofile(folder / "part-00001.bin")
    source = open_tokenized(request(folder, vocab_size=BYTE.vocab_size))
    message = r"part-00001\.bin, document 5: token 3 has the id 40000, .*: the file is damaged"
    with pytest.raises(CorruptRecord) as caught:
        list(source.shard(0, 1, 0))
    assert re.search(message, f"{caught.value.place}: {caught.value.why}")
    # data.on_corrupt applies to these documents too.
    training = DatasetSpec(
        "tokenized", 1.0, Ref("titan_data.tokenized:open_tokenized"), request(folder, vocab_size=BYTE.vocab_size)
    )
    (strict, lenient) = (
        DataLoader(stream(training, plan=PLAN, on_corrupt=what), [source], BYTE, 0) for what in ("stop", "skip")
    )
    with pytest.raises(UserError, match=message):
        list(iter(strict.next_step, None))
    corrupt = 0
    while not corrupt:
        step = lenient.next_step()
        assert step is not None
        corrupt = step.corrupt
    strict.close()
    lenient.close()


def test_document_ends_that_are_out_of_order_are_reported_with_their_file(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    make(folder, parts=1)
    intact = numpy.fromfile(folder / "part-00000.idx", "<i8")
    for place, value in ((7, intact[6] - 1), (7, intact[8] + 1), (0, -1), (7, intact[-1] + 1)):
        ends = intact.copy()
        ends[place] = value
        ends.tofile(folder / "part-00000.idx")
        with pytest.raises(UserError, match=r"part-00000\.idx: .*(the index is damaged|does not match the data)"):
            list(open_tokenized(request(folder)).shard(0, 1, 0))


def test_a_job_checks_its_tokenised_dataset_against_its_tokenizer(tmp_path: Path) -> None:
    make(tmp_path / "tokens")
    settings = {"training.dataset": "tokenized", "training.dataset_path": tmp_path / "tokens"}
    context = make_job("tiny", settings).data.datasets[0].context
    assert context.vocab_size == BYTE.vocab_size
    assert context.tokenizer == BYTE.fingerprint()


@pytest.mark.parametrize("ids", [[1, 258, 2], [1, -1], [2**40], numpy.array([1.0, 2.0]), numpy.array([[1]])], ids=str)
def test_token_ids_from_plugins_are_checked_against_the_vocabulary(tmp_path: Path, ids: Any) -> None:
    class Odd(TextTokenizer):
        vocab_size = 258

        def encode_document(self, text: str) -> Any:
            return ids if text else []

        def decode(self, ids: object) -> str:
            return ""

    spec = letters("3,4,5,6")
    reader = DocumentReader(ReadPolicy(), "mine")
    why = "the largest id of the vocabulary is 257|not a list of token ids"
    with pytest.raises(UserError, match=f"dataset 'mine', logical shard 0 of 1, .*{why}.*fix the plugin of the tokenizer"):
        TokenStream(spec.build.load()(spec.context), Odd(), 0, 1, "repeat", "mine", reader).take(5)

    class Source:
        def __len__(self) -> int:
            return 1

        def text(self, index: int) -> Any:
            return numpy.asarray(ids)

    with pytest.raises(UserError, match=f"{why}.*fix the plugin of the dataset"):
        TokenStream(ShuffledDocuments(Source(), 0), BYTE, 0, 1, "repeat", "mine", reader).take(5)


def test_ids_never_overflow_the_stored_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may produce ids beyond the vocabulary size that it reports."""
    spec = stream(letters("3,4"), plan=PLAN)
    (tmp_path / UNFINISHED).touch()
    monkeypatch.setattr(type(BYTE), "vocab_size", 100)
    with pytest.raises(UserError, match=r"dataset 'letters', part 0, document 0: token 0 has the id 256"):
        PartTask(spec, spec.datasets[0], str(tmp_path), 1, "<u2", BYTE.fingerprint(), 2)(0)
