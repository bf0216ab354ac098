"""The provenance of a run (`titan data step`, `titan data where`): what they list, read and tokenised by hand, is what the
trainer trained on."""

from __future__ import annotations

import hashlib
import json
import random
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from benchmarks.chaos.session import SEQUENCES
from benchmarks.chaos.trail import trajectory
from harness import resuming
from harness.fake_hub import folders_for_the_hub
from harness.hand_read import byte_ids, documents_of, inputs_of, printed, rows_by_hand, text_at
from harness.recorded_jobs import Recorded
from harness.recorded_runs import LENGTH, MIXTURE, SETTINGS, error_of, text, write_data
from titan_core.api import hookimpl
from titan_core.cli.invocation import Invocation
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_data.provenance.documents import UsedDocument, documents_of_step
from titan_data.provenance.recorded_run import RecordedRun, open_run
from titan_data.provenance.steps import steps_of_document
from titan_testing.gloo_pool import GlooPool
from titan_testing.jobs import run_recipe


class Stopped(Exception):
    pass


class Seen:
    """An observer that records the inputs of each step, by row, and fails in one."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.steps: dict[int, dict[int, list[int]]] = {}
        self._fails_in = fails_in

    @hookimpl
    def titan_before_update(self, update: Any) -> None:
        if update.step == self._fails_in:
            raise Stopped
        rows = self.steps[update.step] = {}
        for batch in update.microbatches:
            rows.update(zip(batch.rows.tolist(), batch.tokens.tolist(), strict=True))


def train(steps: int, more: dict[str, object], fails_in: tuple[int, ...] = ()) -> dict[int, dict[int, list[int]]]:
    """Train a run that fails in some steps and is resumed each time. Return the inputs of each step, by row."""
    seen: dict[int, dict[int, list[int]]] = {}
    for fails in (*fails_in, None):
        attempt = Seen(fails)
        try:
            run_recipe("tiny", {**SETTINGS, "training.steps": steps, **more}, observers=[attempt])
        except Stopped:
            assert fails is not None
        seen |= attempt.steps
    return seen


def opened_run(folder: Path) -> RecordedRun:
    """Return a run as the commands open it."""
    return open_run(Invocation(Namespace(), Components.from_installed()), str(folder))


PACKINGS = ("concatenate", "best_fit")


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_a_step_lists_is_what_it_trained_on(packing: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    steps = 48
    seen = train(steps, {"data.packing": packing}, fails_in=(17, 34))
    assert set(seen) == set(range(1, steps + 1))
    listed = {}
    for step in [*random.Random(packing).sample(range(1, steps + 1), 8), 1, 18, 31, steps]:
        listed[step] = documents_of(capsys, in_tmp / "run", step)
        rows = rows_by_hand(listed[step], LENGTH, lambda place: byte_ids(text_at(place)))
        assert inputs_of(rows) == [seen[step][number] for number in range(len(rows))]
    used = [one for documents in listed.values() for one in documents]
    assert {one["epoch"] for one in used} >= {0, 1} and {one["dataset"] for one in used} == {"lines", "rows"}
    assert any(one["tokens"] < one["of"] for one in used)
    for one in random.Random(packing).sample(used, 3):
        uses = printed(capsys, "data", "where", "run", one["place"])["uses"]
        here = [{key: value for key, value in use.items() if key != "step"} for use in uses]
        for step, documents in listed.items():
            expected = [two for two in documents if two["place"] == one["place"]]
            assert [two for two, use in zip(here, uses, strict=True) if use["step"] == step] == expected


def digest_of(row: list[int]) -> str:
    """Return what ``benchmarks.chaos.site`` records of a sequence."""
    tokens = numpy.array(row, numpy.int64)
    return hashlib.sha256(tokens[:-1].tobytes() + tokens[1:].tobytes()).hexdigest()[:16]


@pytest.mark.long
def test_two_hundred_steps_of_a_job_that_was_killed(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several epochs of both datasets, on 2, 4 and 1 ranks."""
    write_data(in_tmp)
    mixture = MIXTURE.replace('"lines"', f'"{in_tmp}/lines"', 1).replace('"rows.parquet"', f'"{in_tmp}/rows.parquet"')
    steps, chance = 240, random.Random(9)
    settings: dict[str, object] = {
        "data.mixture": mixture,
        "data.on_corrupt": "skip",
        "training.steps": steps,
        "checkpoint.interval": 7,
        "checkpoint.keep_latest_k": 8,
        "checkpoint.keep_every_n_steps": 35,
    }
    job = Recorded(in_tmp / "job", settings)
    for ranks, until in zip((2, 4, 2), sorted(chance.sample(range(20, steps), 3)), strict=True):
        job.train(ranks, until)
    job.train_here()
    expected, problems = trajectory(job.attempts, SEQUENCES)
    assert problems == [] and len(expected) == steps and len(job.attempts) == 4
    run, uses = in_tmp / "job/run", []
    opened = opened_run(run)
    for number, step in enumerate(chance.sample(range(1, steps + 1), 200)):
        documents = [vars(one) for one in documents_of_step(opened, step)]
        if number < 5:
            assert documents == documents_of(capsys, run, step)
        uses += [(step, one) for one in documents]
        rows = rows_by_hand(documents, LENGTH, lambda place: byte_ids(text_at(place)))
        assert {number: digest_of(row) for number, row in enumerate(rows)} == expected[step], step
    assert {use["epoch"] for _, use in uses} >= {0, 1, 2}
    for step, used in chance.sample(uses, 20):
        assert (step, UsedDocument(**used)) in steps_of_document(opened, used["place"])


@pytest.mark.parametrize(
    ("packing", "shuffle"), [("best_fit", "none"), pytest.param("concatenate", "documents", marks=pytest.mark.full)]
)
def test_where_is_the_inverse_of_step(packing: str, shuffle: str, in_tmp: Path) -> None:
    """For every document, wherever the checkpoints are, while logical shards are in different epochs."""
    write_data(in_tmp)
    steps = 70
    train(
        steps, {"data.packing": packing, "data.shuffle": shuffle, "checkpoint.keep_latest_k": 0, "checkpoint.interval": 12}
    )
    opened = opened_run(in_tmp / "run")
    uses: dict[str | None, list[tuple[int, UsedDocument]]] = defaultdict(list)
    for step in range(1, steps + 1):
        for one in documents_of_step(opened, step):
            uses[one.place].append((step, one))
    last: dict[int, int] = {}
    for one in (one for found in uses.values() for _, one in found if one.dataset == "rows"):
        last[one.shard] = max(last.get(one.shard, 0), one.epoch)
    assert shuffle != "none" or max(last.values()) > min(last.values()) + 1
    places = [f"lines/a.jsonl:{number}" for number in (1, 2, 3, 6, *range(13, 26))]
    places += [f"rows.parquet, row {number}" for number in range(18)]
    assert len(uses.keys() & set(places)) > 25
    for place in places:
        found = steps_of_document(opened, place)
        assert sorted(found, key=in_order) == sorted(uses[place], key=in_order), place


def in_order(use: tuple[int, UsedDocument]) -> tuple[int, ...]:
    step, used = use
    return step, used.row, used.epoch, used.first_token


def provenance(folder: str, settings: dict[str, object]) -> None:
    resuming.run_in(folder, settings)


@pytest.mark.full
def test_the_books_are_the_same_on_any_mesh(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    settings = {**SETTINGS, "training.steps": 12, "checkpoint.interval": 5}
    gloo.run(1, provenance, str(in_tmp), {**settings, "job.dump_folder": "alone"})
    divided = {"parallelism.data_parallel_shard_degree": 2, "training.local_batch_size": 1}
    gloo.run(2, provenance, str(in_tmp), {**settings, **divided, "job.dump_folder": "divided"})
    for command, *arguments in (("step", 1), ("step", 7), ("step", 12), ("where", "lines/a.jsonl:16")):
        alone, two = (printed(capsys, "data", command, run, *arguments) for run in ("alone", "divided"))
        assert alone == two and (alone.get("documents") or alone["uses"])


def append(folder: Path) -> None:
    with (folder / "lines/b.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")


def swap(folder: Path) -> None:
    first, second, *rest = (folder / "lines/b.jsonl").read_text().splitlines(keepends=True)
    (folder / "lines/b.jsonl").write_text("".join([second, first, *rest]))


@pytest.mark.parametrize("change", [append, swap])
@pytest.mark.parametrize("arguments", [("step", 2), ("step", 12), ("where", "lines/a.jsonl:16")], ids=str)
def test_changed_data_is_refused(
    change: Callable[[Path], None],
    arguments: tuple[object, ...],
    in_tmp: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(in_tmp)
    error = error_of(capsys, "data", arguments[0], "run", *arguments[1:])
    assert "dataset 'lines'" in error and "differs from the data that the run was trained on" in error
    assert error.endswith("restore what the run read")


@pytest.fixture
def trained(in_tmp: Path) -> Path:
    """A run of 12 steps with a checkpoint in step 10."""
    write_data(in_tmp)
    train(12, {})
    return in_tmp / "run"


def test_mistakes_are_one_error(in_tmp: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no dataset of the run has a document there" in error_of(capsys, "data", "where", "run", "lines/a.jsonl:99")
    assert "no dataset of the run has a document there" in error_of(capsys, "data", "where", "run", "nonsense")
    (in_tmp / "empty").mkdir()
    assert "pass a run's directory" in error_of(capsys, "data", "step", "empty", "1")
    assert "pass a run's directory" in error_of(capsys, "data", "step", "nowhere", "1")
    assert "training.seed" in error_of(capsys, "data", "step", "run", "11", "--training.seed", "5")
    batch = ("--training.global_batch_size", "8", "--data.logical_shards", "4")
    assert "the batch has changed" in error_of(capsys, "data", "step", "run", "11", *batch)


def test_data_that_has_moved_is_found_by_an_override(
    in_tmp: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = documents_of(capsys, trained, 11)
    (in_tmp / "rows.parquet").rename(in_tmp / "moved.parquet")
    moved = ("--data.mixture", MIXTURE.replace("rows.parquet", "moved.parquet"))
    after = printed(capsys, "data", "step", "run", 11, *moved)["documents"]
    assert [one["place"].replace("moved", "rows") for one in after] == [one["place"] for one in before]


def test_a_run_without_checkpoints_is_read_from_its_start(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    seen = train(6, {"checkpoint.enable": "false"})
    assert main(["data", "step", "run", "5"]) == 0
    assert "titan: reading 5 steps of data, from the beginning" in capsys.readouterr().err
    rows = rows_by_hand(documents_of(capsys, in_tmp / "run", 5), LENGTH, lambda place: byte_ids(text_at(place)))
    assert inputs_of(rows) == [seen[5][number] for number in range(len(rows))]


def test_the_batch_is_that_of_the_runs_ranks(gloo: GlooPool, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch whose size follows from the number of ranks."""
    write_data(in_tmp)
    settings = {**SETTINGS, "training.steps": 3, "training.local_batch_size": 3, "training.global_batch_size": -1}
    gloo.run(2, provenance, str(in_tmp), {**settings, "checkpoint.interval": 2})
    for step in (1, 3):
        assert {one["row"] for one in documents_of(capsys, in_tmp / "run", step)} == set(range(6))


@folders_for_the_hub()
def test_a_stream_of_the_hub_has_steps_and_no_where(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    (in_tmp / "lines/a.jsonl").unlink()
    settings = {"data.mixture": '[{dataset = "hub", dataset_path = "lines", name = "web"}]', "data.shuffle_buffer": 3}
    seen = train(12, settings)
    step = documents_of(capsys, in_tmp / "run", 11)  # after a checkpoint

    def record_of(place: str) -> int:
        number = re.fullmatch(r"dataset 'lines', record ([0-9]+) of its shard", place)
        assert number is not None
        return int(number[1])  # one file, of which each shard counts all records

    rows = rows_by_hand(step, LENGTH, lambda place: byte_ids(text(29 + record_of(place))))
    assert inputs_of(rows) == [seen[11][number] for number in range(len(rows))]
    assert "cannot be inverted" in error_of(capsys, "data", "where", "run", step[0]["place"])


@pytest.mark.full
@pytest.mark.parametrize("kept", [0, 2])
def test_steps_before_an_accepted_change_are_refused(kept: int, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether checkpoints of the old data are kept or not. Those of the new data are listed as they were trained on."""
    write_data(in_tmp)
    settings = {"checkpoint.keep_latest_k": kept, "checkpoint.interval": 3}
    train(6, settings)
    swap(in_tmp)
    seen = train(12, {**settings, "checkpoint.allow_changed": '["dataset.lines.content"]'})
    for step in (12, 13):
        rows = rows_by_hand(documents_of(capsys, in_tmp / "run", step), LENGTH, lambda place: byte_ids(text_at(place)))
        assert step > 12 or inputs_of(rows) == [seen[step][number] for number in range(len(rows))]
    for arguments in (("step", 2), ("step", 5), ("step", 7), ("where", "lines/a.jsonl:16")):
        error = error_of(capsys, "data", arguments[0], "run", *arguments[1:])
        assert ("differs from the data" if not kept else "accepted other documents (checkpoint.allow_changed)") in error


@pytest.mark.full
def test_a_change_that_was_allowed_and_not_made(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(in_tmp)
    settings = {"checkpoint.keep_latest_k": 0, "checkpoint.interval": 3, "checkpoint.allow_changed": '["dataset.*.content"]'}
    seen = train(6, settings)
    seen |= train(12, settings)
    for step in (2, 5, 8, 11):
        rows = rows_by_hand(documents_of(capsys, in_tmp / "run", step), LENGTH, lambda place: byte_ids(text_at(place)))
        assert inputs_of(rows) == [seen[step][number] for number in range(len(rows))]
    assert printed(capsys, "data", "where", "run", "lines/a.jsonl:16")["uses"]
