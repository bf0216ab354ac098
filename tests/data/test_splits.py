"""A job reads only the requested split of a dataset."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from titan_core.api import DatasetContext, UserError
from titan_data.huggingface import open_hub
from titan_data.local_files import ENDINGS, check_files, check_hub, find_files
from titan_data.record_files import check_tables, open_local
from titan_data.text_files import open_text
from titan_testing.jobs import make_job


def request(
    name: str, path: Path | str, split: str | None = None, default: Literal["train", "validation"] = "train"
) -> DatasetContext[None]:
    return DatasetContext(name, str(path), "text", 0, "here", split=split, default_split=default, section=None)


def found(context: DatasetContext[None]) -> list[str]:
    root = Path(context.path or "")
    root = root if root.is_dir() else root.parent
    return [str(file.relative_to(root)) for file in find_files(context, ENDINGS[context.name])]


def laid_out(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": f"of {name}"}) + "\n")
    return folder


LAYOUTS: dict[str, dict[str, list[str]]] = {
    "folders": {"train": ["train/a.jsonl", "train/b.jsonl"], "test": ["test/a.jsonl"], "validation": ["validation/a.jsonl"]},
    "other words": {"train": ["training/a.jsonl"], "test": ["eval/a.jsonl"], "validation": ["dev/a.jsonl"]},
    "files": {"train": ["train.jsonl"], "test": ["test.jsonl"], "validation": ["valid.jsonl"]},
    "shards": {"train": ["c4-train.00000-of-00002.json"], "validation": ["c4-validation.00000-of-00001.json"]},
    "numbers": {"train": ["train_0.jsonl", "train_1.jsonl"], "test": ["test_0.jsonl"]},
    "hub": {
        "train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
        "test": ["data/test-00000-of-00001.jsonl"],
    },
    "hub, custom names": {
        "train_sft": ["data/train_sft-00000-of-00001.jsonl"],
        "test_sft": ["data/test_sft-00000-of-00001.jsonl"],
    },
    "deep": {"train": ["en/train/x/a.jsonl", "de/train/a.jsonl"], "test": ["en/test/train.jsonl"]},
    "words in folders": {"train": ["my-train-set/a.jsonl"], "test": ["my test/a.jsonl"]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_found_in_the_layouts_of_the_hub(tmp_path: Path, layout: str) -> None:
    splits = LAYOUTS[layout]
    laid_out(tmp_path, [name for names in splits.values() for name in names])
    for split, names in splits.items():
        assert found(request("json", tmp_path, split)) == sorted(names)
    assert found(request("json", tmp_path, "all")) == sorted(name for names in splits.values() for name in names)
    if "train" in splits:
        assert found(request("json", tmp_path)) == sorted(splits["train"])
    else:
        message = (
            f"it is ambiguous which split to read: the splits are {', '.join(sorted(splits))}; "
            "set training.dataset_split to one of"
        )
        with pytest.raises(UserError, match=message):
            found(request("json", tmp_path))
    with pytest.raises(UserError, match=r"training.dataset_split is 'nothing', but the (only split is|splits are)"):
        found(request("json", tmp_path, "nothing"))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "deep"])
def test_the_datasets_library_finds_the_same_splits(tmp_path: Path, layout: str) -> None:
    from datasets.data_files import DataFilesPatternsDict, get_data_patterns

    laid_out(tmp_path, [name for names in LAYOUTS[layout].values() for name in names])
    patterns = DataFilesPatternsDict.from_patterns(get_data_patterns(str(tmp_path)))
    theirs = {split: sorted(map(str, files)) for split, files in patterns.resolve(str(tmp_path)).items()}
    ours = {
        split: sorted(str(file) for file in find_files(request("json", tmp_path, split), ENDINGS["json"]))
        for split in LAYOUTS[layout]
    }
    assert {str(split): files for split, files in theirs.items()} == ours


def test_synonyms_of_a_split_name_are_equivalent(tmp_path: Path) -> None:
    laid_out(tmp_path, ["train.jsonl", "val.jsonl"])
    for name in ("val", "valid", "validation", "dev"):
        assert found(request("json", tmp_path, name)) == ["val.jsonl"]


WITHOUT_SPLITS = [
    ["a.jsonl", "b/c.jsonl"],
    ["contest.jsonl", "trainee/latest.jsonl"],  # words within words
    ["train-test.jsonl", "more.jsonl"],  # two keywords in one name do not count
    ["data/part-00000-of-00002.jsonl", "data/part-00001-of-00002.jsonl"],
    ["train.jsonl", "extra/more.jsonl"],  # all of it is training data
]


@pytest.mark.parametrize("names", WITHOUT_SPLITS, ids=str)
def test_a_folder_without_splits_is_read_whole(tmp_path: Path, names: list[str]) -> None:
    laid_out(tmp_path, names)
    assert found(request("json", tmp_path)) == sorted(names)
    if "train.jsonl" not in names:
        with pytest.raises(UserError, match=r"is 'train', but no folder or file is named after a split; drop the key"):
            found(request("json", tmp_path, "train"))


AMBIGUOUS = {
    "only a test split": (["test/a.jsonl"], "the only split is test; set training.dataset_split to test, or 'all'"),
    "no train split": (["test/a.jsonl", "dev/a.jsonl"], "ambiguous which split to read: the splits are test, validation;"),
    "files beside a test split": (
        ["a.jsonl", "test.jsonl"],
        r"the only split is test, and there are files outside all splits \(a.jsonl\)",
    ),
    "files beside splits": (
        ["a.jsonl", "train.jsonl", "test.jsonl"],
        r"the splits are test, train, and there are files outside all splits \(a.jsonl\)",
    ),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_an_ambiguous_train_split_is_refused(tmp_path: Path, case: str) -> None:
    names, why = AMBIGUOUS[case]
    laid_out(tmp_path, names)
    (problem,) = check_files(request("json", tmp_path))
    assert problem.where == "here"
    with pytest.raises(UserError, match=why):
        raise UserError(problem)
    assert found(request("json", tmp_path, "all")) == sorted(names)
    assert found(request("json", tmp_path, "test")) == [name for name in sorted(names) if "test" in name]


def test_validation_reads_the_validation_split_or_a_lone_test_split(tmp_path: Path) -> None:
    def validated(folder: str, names: list[str]) -> list[str]:
        return found(request("json", laid_out(tmp_path / folder, names), default="validation"))

    assert validated("a", ["train.jsonl", "test.jsonl", "dev.jsonl"]) == ["dev.jsonl"]
    assert validated("b", ["test/a.jsonl"]) == ["test/a.jsonl"]
    assert validated("c", ["a.jsonl"]) == ["a.jsonl"]
    for folder, names in {"d": ["train.jsonl"], "e": ["train.jsonl", "test.jsonl"]}.items():
        with pytest.raises(UserError, match="it is ambiguous which split to read"):
            validated(folder, names)


def test_globs_follow_the_same_rules_and_a_single_file_is_read_as_it_is(tmp_path: Path) -> None:
    laid_out(tmp_path, ["x/train-0.jsonl", "x/test-0.jsonl"])
    assert found(request("json", f"{tmp_path}/x/*.jsonl")) == ["train-0.jsonl"]
    assert [file.name for file in find_files(request("json", f"{tmp_path}/*/*.jsonl", "test"), (".jsonl",))] == [
        "test-0.jsonl"
    ]
    assert found(request("json", f"{tmp_path}/x/test-0.jsonl")) == ["test-0.jsonl"]
    with pytest.raises(UserError, match="ambiguous which split to read: the only split is test;"):
        found(request("json", f"{tmp_path}/x/test*"))
    with pytest.raises(UserError, match="the path names a single file; drop the key"):
        found(request("json", tmp_path / "x/test-0.jsonl", "test"))


def test_only_folders_define_splits_of_text_files(tmp_path: Path) -> None:
    """A folder of documents may contain one about tests."""
    for name in ("guide.md", "test.md", "dev-notes.txt"):
        (tmp_path / name).write_text(name)
    assert len(list(open_text(request("text", tmp_path)).shard(0, 1, 0))) == 3
    for name in ("train", "test"):
        (tmp_path / "split" / name).mkdir(parents=True)
        (tmp_path / "split" / name / "a.txt").write_text(name)
    assert list(open_text(request("text", tmp_path / "split")).shard(0, 1, 0)) == ["train"]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with splits, written by ``save_to_disk``."""
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    both = {name: datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(4)]}) for name in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def texts(context: DatasetContext[None]) -> list[Any]:
    return sorted(open_local(context).shard(0, 1, 0))


def test_a_saved_dataset_dict_trains_on_its_train_split(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert check_tables(request("arrow", saved)) == []
    assert texts(request("arrow", saved)) == [f"train {i}" for i in range(4)]
    assert "reading split 'train' of test, train" in caplog.text
    assert texts(request("arrow", saved, "test")) == [f"test {i}" for i in range(4)]
    assert len(texts(request("arrow", saved, "all"))) == 8
    assert texts(request("arrow", saved / "test")) == [f"test {i}" for i in range(4)]  # a saved Dataset
    (saved / "train").rename(saved / "mine")
    (saved / "dataset_dict.json").write_text('{"splits": ["mine", "test"]}')
    with pytest.raises(UserError, match="ambiguous which split to read: the splits are mine, test;"):
        texts(request("arrow", saved))
    assert texts(request("arrow", saved, "mine")) == [f"train {i}" for i in range(4)]


def test_caches_in_a_saved_dataset_are_ignored(saved: Path) -> None:
    shutil.copy(saved / "test/data-00000-of-00001.arrow", saved / "train/cache-0123456789abcdef.arrow")
    assert texts(request("arrow", saved)) == [f"train {i}" for i in range(4)]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"splits": 3, "_data_files": 3}', "[" * 100_000, '{"_data_files": [3]}']
)
def test_a_damaged_list_of_a_saved_dataset_is_one_clear_error(saved: Path, content: str) -> None:
    for file in (saved / "train/state.json", saved / "dataset_dict.json"):
        before = file.read_text()
        file.write_text(content)
        (problem,) = check_tables(request("arrow", saved))
        assert problem.where == str(file)
        assert problem.fix == "save the dataset again"
        file.write_text(before)
        if content.startswith('{"_data'):
            break  # dataset_dict.json has no such key


def test_a_missing_part_of_a_saved_dataset_is_reported(saved: Path) -> None:
    state = json.loads((saved / "train/state.json").read_text())
    state["_data_files"].append({"filename": "data-00001-of-00002.arrow"})
    (saved / "train/state.json").write_text(json.dumps(state))
    (problem,) = check_tables(request("arrow", saved))
    assert "data-00001-of-00002.arrow: missing, although state.json lists it" in str(problem)


@pytest.mark.parametrize(
    ("name", "path", "split", "default", "expected"),
    [
        ("hub", "user/set", None, "train", ("user/set", None, "train")),
        ("hub", "user/set:en", None, "validation", ("user/set", "en", "validation")),
        ("hub", "user/set", "extra", "train", ("user/set", None, "extra")),
        ("c4", None, None, "train", ("allenai/c4", "en", "train")),
        ("c4_validation", None, None, "train", ("allenai/c4", "en", "validation")),
        ("c4", None, "validation", "train", ("allenai/c4", "en", "validation")),
    ],
)
def test_the_requested_split_of_a_hub_dataset_is_streamed(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str | None, split: str | None, default: Any, expected: object
) -> None:
    loaded: list[object] = []

    class Builder:
        def __init__(self, path: str, configuration: str | None) -> None:
            self.named = path, configuration
            self.config = SimpleNamespace(data_files={"train": [f"hf://datasets/{path}@abc/train.jsonl"]})

        def as_streaming_dataset(self, split: str) -> object:
            loaded.append((*self.named, split))
            if split == "extra":
                raise ValueError("Bad split: extra. Available splits: ['train']")
            return object()

    monkeypatch.setattr("datasets.load_dataset_builder", Builder)
    context = replace(request(name, "", split, default), path=path)
    if split == "extra":
        with pytest.raises(
            UserError, match=r"split 'extra'.*Available splits: \['train'\]; check the name, training.dataset_sp"
        ):
            open_hub(context)
    else:
        open_hub(context)
    assert loaded == [expected]
    (problem,) = check_hub(replace(context, path="user/set", split="all"))
    assert "cannot stream all splits at once; name one split" in str(problem)


@pytest.mark.parametrize(
    "path", ["pandas", "json", "user", "../user/set", "./set", "/set", "user/..", "user/set/more", "a b/c"]
)
def test_only_names_of_the_hub_are_streamed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of ``datasets`` and folders of this machine have other names; the reader "pandas" unpickled files."""
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: pytest.fail("it was opened"))
    context = replace(request("hub", "", None), path=path)
    (problem,) = check_hub(context)
    assert "is not the name of a dataset on the hub; write organisation/name" in str(problem)
    with pytest.raises(UserError, match="is not the name of a dataset on the hub"):
        open_hub(context)


def test_a_folder_is_not_taken_for_a_dataset_of_the_hub(in_tmp: Path) -> None:
    Path("user/set").mkdir(parents=True)
    (problem,) = check_hub(replace(request("hub", "", None), path="user/set:en"))
    assert "'user/set' is a file or folder here, and dataset 'hub' reads from the hub only" in str(problem)


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "file:///etc/passwd", "hf://datasets/other/set@abc/x.jsonl", "hf://datasets/user/set@abc/../../x.jsonl",
     "https://example.org/x.jsonl"],
)  # fmt: skip
def test_a_dataset_card_cannot_name_files_elsewhere(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": ["hf://datasets/User/set@abc/good.jsonl", file]}))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: builder)
    with pytest.raises(UserError, match=r"its card names the file .*, which is not part of the dataset"):
        open_hub(replace(request("hub", "", None), path="user/set"))


JOBS: dict[str, tuple[dict[str, object], str]] = {
    "no splits": ({"training.dataset_split": "train"}, "dataset 'stdlib' has no splits; remove it"),
    "beside a mixture": (
        {"training.dataset_split": "train", "data.mixture": "[{dataset = 'stdlib'}]"},
        'training.dataset_split = "train": conflicts with data.mixture, in which each dataset has its own split',
    ),
    "mixture": (
        {"data.mixture": "[{dataset = 'json', dataset_path = 'two', dataset_split = 'tst'}]"},
        "data.mixture[0].dataset_split is 'tst', but the splits are test, train; set data.mixture[0].dataset_split to",
    ),
    "validation": (
        {"validation.enable": "true", "validation.dataset": "json", "validation.dataset_path": "two"},
        "ambiguous which split to read: the splits are test, train; set validation.dataset_split to one of test,",
    ),
}


@pytest.mark.parametrize("case", JOBS)
def test_a_jobs_splits_are_checked_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    laid_out(tmp_path / "two", ["train.jsonl", "test.jsonl"])
    settings, message = JOBS[case]
    with pytest.raises(UserError) as caught:
        make_job("tiny", dict(settings))
    assert message in str(caught.value)


def test_a_job_passes_its_splits_to_its_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    laid_out(tmp_path / "two", ["train.jsonl", "test.jsonl"])
    second = "{dataset = 'json', dataset_path = 'two', dataset_split = 'test', name = 'b'}"
    mixture = f"[{{dataset = 'json', dataset_path = 'two'}}, {second}]"
    validation = {
        "validation.enable": "true", "validation.dataset": "json", "validation.dataset_path": "two",
        "validation.dataset_split": "test",
    }  # fmt: skip
    job = make_job("tiny", {"data.mixture": mixture, **validation})
    assert [(dataset.context.split, dataset.context.default_split) for dataset in job.data.datasets] == [
        (None, "train"),
        ("test", "train"),
    ]
    assert job.validation is not None
    assert job.validation.datasets[0].context.split == "test"
    assert job.validation.datasets[0].context.default_split == "validation"
