"""Checkpoints of DCP that are malicious, damaged or not understood are refused, and no code in their pickles is executed."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from harness.dcp import IMPORT, MODEL, imported, require_equal, weights, write
from titan_ckpt.foreign.dcp_metadata import read_metadata
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe


def test_a_damaged_checkpoint_is_not_exported(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 0
    data = Path("titan/data-00000.bin")
    data.write_bytes(b"\xff" + data.read_bytes()[1:])
    assert main(["checkpoint", "convert", "titan", "exported", "--to", "dcp"]) == 2
    assert "data-00000.bin is damaged in model." in capsys.readouterr().err
    assert sorted(os.listdir()) == ["source", "titan"]


class Attack:
    """Pickled as a call of ``function``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class External(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return "elsewhere" if value is External else None


def pickled_externally() -> bytes:
    stream = io.BytesIO()
    External(stream).dump(External)
    return stream.getvalue()


ATTACKS = {
    "posix.system": pickle.dumps(Attack(os.system, "touch executed")),
    "builtins.eval": pickle.dumps(Attack(eval, "open('executed', 'w')")),
    "builtins.getattr": pickle.dumps(Attack(getattr, "text", "upper")),
    "functools.partial": pickle.dumps(Attack(__import__("functools").partial, print)),
    "torch.serialization.load": pickle.dumps(Attack(torch.load, "executed")),
    "torch.distributed.checkpoint.metadata.Enum": b"\x80\x04ctorch.distributed.checkpoint.metadata\nEnum\n.",
    "torch.distributed.checkpoint.metadata.os.system": (
        b"\x80\x04\x8c\x27torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    ).replace(b"\x8c\x27", b"\x8c" + bytes([len("torch.distributed.checkpoint.metadata")])),
    "an external object 'elsewhere'": pickled_externally(),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_malicious_pickle_is_refused_and_nothing_is_executed(
    copied: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (copied / ".metadata").write_bytes(ATTACKS[name])
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"contains {name}, which DCP's metadata never does; nothing of it was executed" in line
    assert not Path("executed").exists() and not Path("titan").exists()


def test_a_pickle_cannot_change_the_unpickler(copied: Path) -> None:
    """A pickle may set attributes of what it names. Only the classes of one file change."""
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    changed = b"\x80\x04" + index + b"N}\x8c\x0c__setstate__" + index + b"s\x86b."
    good = (copied / ".metadata").read_bytes()
    (copied / ".metadata").write_bytes(changed)
    with pytest.raises(UserError, match=r"is not DCP's metadata|in place of a Metadata"):
        read_metadata(copied)
    (copied / ".metadata").write_bytes(good)
    assert read_metadata(copied).keys() == weights().keys()


def test_a_pickle_is_read_only_with_consent(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / ".metadata").write_bytes(ATTACKS["posix.system"])
    assert main(["checkpoint", "convert", "source", "titan", *MODEL]) == 2
    assert "add --allow-pickle" in capsys.readouterr().err


def edited(folder: Path, edit: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def infos(metadata: Metadata) -> Iterator[Any]:
    return (info for index, info in metadata.storage_data.items() if index.fqn == "norm.weight")


def described(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["norm.weight"]


LIES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "no chunk": (lambda m: described(m).chunks.clear(), "norm.weight is incomplete: its chunks cover 0 of 32 elements"),
    "large": (lambda m: setattr(described(m), "size", torch.Size([33])), "norm.weight is incomplete"),
    "small": (lambda m: setattr(described(m), "size", torch.Size([31])), "norm.weight has a chunk out of bounds"),
    "overlap": (lambda m: overlap(m), "norm.weight has overlapping chunks"),
    "dtype": (
        lambda m: setattr(described(m).properties, "dtype", torch.bfloat16),
        "contains float32 [32] for norm.weight, but .metadata describes bfloat16 [32]",
    ),
    "outside": (lambda m: [setattr(i, "relative_path", "../secret") for i in infos(m)], "is not a file of its folder"),
    "transform": (
        lambda m: [setattr(i, "transform_descriptors", ["stream.zstd"]) for i in infos(m)],
        "norm.weight is stored with a transform (['stream.zstd']), which is not supported",
    ),
    "another": (lambda m: [setattr(i, "offset", next(j.offset for j in others(m))) for i in infos(m)], "__0_0.distcp: "),
    "nowhere": (
        lambda m: [m.storage_data.pop(k) for k in list(m.storage_data) if k.fqn == "norm.weight"],
        "does not locate",
    ),
    "undescribed": (lambda m: m.state_dict_metadata.pop("norm.weight"), "locates norm.weight, but does not describe it"),
    "newer field": (lambda m: setattr(described(m), "scales", 1), "with an unknown field 'scales'"),
    "newer version": (lambda m: setattr(m, "version", "2.0.0"), "has version '2.0.0'"),
    "wrong type": (lambda m: setattr(m, "storage_data", [1]), "has a list in place of storage_data"),
}


def others(metadata: Metadata) -> Iterator[Any]:
    return (info for index, info in metadata.storage_data.items() if index.fqn == "tok_embeddings.weight")


def overlap(metadata: Metadata) -> None:
    chunk = described(metadata).chunks[0]
    described(metadata).chunks.append(type(chunk)(chunk.offsets, torch.Size([16])))


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("lie", LIES)
def test_contradictions_are_refused(copied: Path, capsys: pytest.CaptureFixture[str], lie: str) -> None:
    edit, why = LIES[lie]
    edited(copied, edit)  # type: ignore[arg-type]
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert not Path("titan").exists()


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no pickle": (".metadata", lambda data: b"{}", "is not DCP's metadata, or damaged"),
    "cut metadata": (".metadata", lambda data: data[:-100], "is not DCP's metadata, or damaged"),
    "cut data": ("__0_0.distcp", lambda data: data[:-100], "__0_0.distcp: ends within"),
    "zeros": ("__0_0.distcp", lambda data: bytes(len(data)), "tok_embeddings.weight is damaged"),
    "missing": ("__0_0.distcp", lambda data: None, "cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(copied: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    name, change, why = DAMAGE[damage]
    data = change((copied / name).read_bytes())
    (copied / name).unlink()
    if data is not None:
        (copied / name).write_bytes(data)
    assert main(["checkpoint", "convert", "source", "titan", *IMPORT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_what_is_not_understood_is_refused_until_it_is_excluded(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = weights()
    convert = ["checkpoint", "convert", "source", "titan", *IMPORT]
    write("source", {"model": {**state, "layers.0.scale": torch.ones(1), "layers.0._extra_state": b"1"}, "ema": 0.5})
    excluded: list[str] = []
    for why, pattern in (
        ("model.layers.0._extra_state is a Python object", "*._extra_state"),
        ("ema is a Python object, not a tensor, and is not known to hold no weights; leave it out: --exclude ema", "ema"),
        ("model.layers.0.scale does not belong to the model", "model.layers.0.scale"),
    ):
        assert main([*convert, *excluded]) == 2
        assert why in capsys.readouterr().err
        excluded += ["--exclude", pattern]
    assert main([*convert, *excluded, "--exclude", "typo"]) == 2
    assert "--exclude typo: matches nothing in source" in capsys.readouterr().err
    assert main([*convert, *excluded]) == 0
    require_equal(imported(), state)


@pytest.mark.parametrize("path", ["source", "run", "run/checkpoint"])
def test_other_commands_say_how_to_use_the_folder(copied: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    Path("run/checkpoint").mkdir(parents=True)
    copied.rename("run/checkpoint/step-7")
    path = path.replace("source", "run/checkpoint/step-7")
    assert main(["checkpoint", "show", path]) == 2
    assert "written by torch.distributed.checkpoint, not by Titan: convert it with" in capsys.readouterr().err


OPTIONS = (
    (["source", "new", "--allow-pickle"], "does not describe its model; add --recipe RECIPE|FILE, or --model.flavor NAME"),
    (["source", "new", *IMPORT, "--training.steps", "3"], "--training.steps: has no effect"),
    (["source", "new", *IMPORT, "--to", "dcp"], "--to: has no effect on the conversion of a DCP folder"),
    (["source", "new", *IMPORT, "--model", "tiny"], "--model: has no effect on the conversion of a DCP folder"),
    (["source", "step-7", *IMPORT], "only a run may name the folders of its checkpoints step-N"),
    (["titan", "new", "--exclude", "x"], "--exclude: has no effect on the conversion of a Titan checkpoint"),
    (["titan", "new", "--model.flavor", "x"], "--model.flavor: has no effect on the conversion of a Titan checkpoint"),
    (["titan", "new", "--to", "dcp", "--tokenizer", "x"], "--tokenizer: has no effect"),
)


@pytest.mark.parametrize(("arguments", "why"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_without_an_effect_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert main(["checkpoint", "convert", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_job_does_not_start_from_the_folder(copied: Path) -> None:
    """It does not say which model it contains."""
    settings = {"checkpoint.enable": "true", "checkpoint.initial_load_path": "source", "job.device": "cpu"}
    with pytest.raises(UserError, match=r"does not describe its model; convert it first: `titan checkpoint convert source"):
        run_recipe("tiny", settings)


def test_two_names_of_one_tensor_are_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = weights()
    convert = ["checkpoint", "convert", "source", "titan", *IMPORT]
    write("source", {"model": state, "norm.weight": state["norm.weight"] + 1})
    assert main(convert) == 2
    assert "contains both norm.weight and model.norm.weight, two names of one tensor" in capsys.readouterr().err
    assert main([*convert, "--exclude", "norm.weight"]) == 0
    assert capsys.readouterr().out.endswith("not imported: norm.weight\n")
    require_equal(imported(), state)
