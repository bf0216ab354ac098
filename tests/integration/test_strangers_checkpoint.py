"""A checkpoint, a tokenizer or a model of a stranger names files of the user: none of them is read, copied or published."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.chat_model import save_model
from titan_ckpt.foreign.hub_push import _files
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_testing.jobs import run_recipe

RUN: dict[str, object] = {
    "model.from_pretrained": "theirs", "model.flavor": "", "model.tokenizer": "hf", "model.tokenizer_path": "theirs",
    "training.seq_len": 16, "training.local_batch_size": 1, "training.steps": 1,
    "checkpoint.enable": "true", "job.device": "cpu", "job.dump_folder": "run",
}  # fmt: skip
SECRET = b"the user's own"
STEP = Path("run/checkpoint/step-1")

_opened: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and "private" in str(arguments[0]):
        _opened.append(str(arguments[0]))


sys.addaudithook(_hook)  # which cannot be removed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with its tokenizer, a run that starts from it, and private files beside both."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save_model(Path("theirs"))
        Path("theirs/additional_chat_templates").mkdir()
        Path("theirs/additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
        run_recipe("llama3_debug", RUN)
    (folder / "private").mkdir()
    for file in (folder / "theirs").glob("*.*"):
        shutil.copy(file, folder / "private")
    for name in ("merges.txt", "vocab.json", "added_tokens.json", "chat_template.jinja", "id_rsa"):
        (folder / "private" / name).write_bytes(SECRET)
    return folder


@pytest.fixture
def here(made: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("theirs", "run", "private"):
        shutil.copytree(made / name, name)
    monkeypatch.setenv("HOME", str(in_tmp))
    return in_tmp


def change(step: Path, **changes: Any) -> None:
    """Change the manifest, and its hash with it."""
    contents = json.loads((step / "checkpoint.json").read_text())["checkpoint"]
    contents |= changes
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    (step / "checkpoint.json").write_text(f'{{"sha256": "{digest}", "checkpoint": {text}}}\n')


def manifest(step: Path) -> dict[str, Any]:
    contents = json.loads((step / "checkpoint.json").read_text())["checkpoint"]
    assert isinstance(contents, dict)
    return contents


def contents(folder: Path | str) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def published(folder: Path) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and SECRET in file.read_bytes()]


@pytest.mark.parametrize("kind", ["hf", pytest.param("llama3", marks=pytest.mark.full)])
@pytest.mark.parametrize("path", ["~/private/tokenizer.json", "~/private", "../../../private/id_rsa"])
def test_no_path_in_a_manifest_is_opened(here: Path, kind: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    global _opened
    about = manifest(STEP)["about"]
    about["config"]["model"] |= {"tokenizer": kind, "tokenizer_path": path.replace("../../..", str(here))}
    change(STEP, about=about, tokenizer={})
    shutil.rmtree(STEP / "tokenizer", ignore_errors=True)
    _opened = []
    try:
        for number, options in enumerate(([], ["--to", "dcp"], ["--dtype", "bfloat16"])):
            assert main(["checkpoint", "convert", "run", f"exported-{number}", *options]) == 0
        assert main(["checkpoint", "merge", str(STEP), str(STEP) + "/", "merged"]) in (0, 2)
        for command in ("list", "show", "verify"):
            assert main(["checkpoint", command, "run"]) == 0
        assert main(["generate", "run", "--prompt", "a"]) == 2
        errors = capsys.readouterr().err
        opened = _opened
    finally:
        _opened = None
    assert opened == [] and published(here / "exported-0") == []
    assert not Path("exported-0/merges.txt").exists() and "pass one with --tokenizer" in errors
    assert "model.tokenizer_path: tokenizer" in errors


def test_a_checkpoint_contains_its_tokenizer(here: Path) -> None:
    before = {name: data for name, data in contents("theirs").items() if "token" in name or "chat" in name}
    assert "additional_chat_templates/tool_use.jinja" in before and "tokenizer.json" in before
    shutil.rmtree("theirs")
    assert contents(STEP / "tokenizer") == before
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in before.items()}
    assert manifest(STEP)["tokenizer"] == hashes
    assert main(["generate", "run", "--prompt", "a", "--max-new-tokens", "1"]) == 0
    assert main(["checkpoint", "convert", "run", "exported"]) == 0
    assert {name: Path("exported", name).read_bytes() for name in before} == before
    assert main(["checkpoint", "convert", "exported", "back"]) == 0
    assert manifest(Path("back"))["tokenizer"] == hashes
    assert main(["run", "branch", "run", "--at", "1", "--to", "branch", "--training.steps", "2"]) == 0
    assert manifest(Path("branch/checkpoint/step-1"))["tokenizer"] == hashes
    assert main(["checkpoint", "rm", "run", "--step", "1", "--force"]) == 0
    assert not STEP.exists()


def test_names_of_a_tokenizer_s_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that its users chose are stored. Any other, and any that only a hostile manifest can have, is refused."""
    Path("theirs/additional_chat_templates/tool use (2).jinja").write_text("{{ messages }}")
    shutil.copytree("theirs", "named")
    run_recipe("llama3_debug", {**RUN, "model.tokenizer_path": "named", "job.dump_folder": "named-run"})
    step = Path("named-run/checkpoint/step-1")
    assert "additional_chat_templates/tool use (2).jinja" in manifest(step)["tokenizer"]
    assert main(["checkpoint", "convert", "named-run", "exported"]) == 0
    assert Path("exported/additional_chat_templates/tool use (2).jinja").exists()
    for name in ("../id_rsa", "additional_chat_templates/../../id_rsa", "a/b", "", "..", "a\nb", "a" * 300):
        change(step, tokenizer={name: "0" * 64})
        assert main(["checkpoint", "show", "named-run"]) == 2
        assert "is not the name of a file" in capsys.readouterr().err
    Path("named/additional_chat_templates/a\x1b[31m.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="has a name that a checkpoint cannot store; rename it"):
        run_recipe("llama3_debug", {**RUN, "model.tokenizer_path": "named", "job.dump_folder": "other"})


def test_a_vocabulary_alone_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = manifest(STEP)["tokenizer"] | {"vocab.json": hashlib.sha256(SECRET).hexdigest()}
    (STEP / "tokenizer/vocab.json").write_bytes(SECRET)
    change(STEP, tokenizer={name: digest for name, digest in files.items() if name != "tokenizer.json"})
    assert main(["generate", "run", "--prompt", "a"]) == 2
    assert "Traceback" not in (said := capsys.readouterr().err) and "step-1: has several files of a tokenizer" in said


def test_a_checkpoint_at_an_address_has_its_tokenizer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setenv("TITAN_CACHE_DIR", str(here / "cache"))
    far: dict[str, object] = {"checkpoint.folder": "memory://tokenized", "job.dump_folder": "far", "training.steps": 2}
    run_recipe("llama3_debug", {**RUN, **far, "checkpoint.keep_latest_k": 1, "checkpoint.interval": 1})
    memory = fsspec.filesystem("memory")
    assert [path for path in memory.find("/tokenized") if "step-1" in path] == []
    shutil.rmtree("theirs")
    assert main(["generate", "memory://tokenized/step-2", "--prompt", "a", "--max-new-tokens", "1"]) == 0


def _names(step: Path) -> None:
    change(step, tokenizer={"../../../../private/id_rsa": hashlib.sha256(SECRET).hexdigest()})


def _damage(step: Path) -> None:
    (step / "tokenizer/tokenizer.json").write_bytes(b"{}")


def _folder(step: Path) -> None:
    shutil.rmtree(step / "tokenizer")
    (step / "tokenizer").symlink_to(Path("private").resolve())


def _file(step: Path) -> None:
    (step / "tokenizer/tokenizer.json").unlink()
    (step / "tokenizer/tokenizer.json").symlink_to(Path("private/tokenizer.json").resolve())


def _data(step: Path) -> None:
    shutil.move(step / "data-00000.bin", "private")
    (step / "data-00000.bin").symlink_to(Path("private/data-00000.bin").resolve())


def _whole(step: Path) -> None:
    shutil.move(step, "private/step-1")
    step.symlink_to(Path("private/step-1").resolve())


WRONG = {
    "a path": (_names, "is not the name of a file"),
    "other contents": (_damage, "tokenizer/tokenizer.json is damaged: its checksum does not match"),
    "a folder that is a link": (_folder, "tokenizer is a link, and a checkpoint is read from its own folder only"),
    "a file that is a link": (_file, "tokenizer/tokenizer.json is a link"),
    "data that is a link": (_data, "data-00000.bin is a link"),
    "a checkpoint that is a link": (_whole, "it is a link: name the folder that it leads to"),
}


@pytest.mark.parametrize(
    "kind", [*list(WRONG)[:3], *(pytest.param(kind, marks=pytest.mark.full) for kind in list(WRONG)[3:])]
)
def test_files_of_a_checkpoint_that_lead_elsewhere_are_refused(
    here: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    act, why = WRONG[kind]
    act(STEP)
    assert main(["checkpoint", "convert", "run", "exported"]) == 2
    assert main(["generate", "run", "--prompt", "a"]) == 2
    errors = capsys.readouterr().err
    assert errors.count(why) == 2 and not Path("exported").exists()
    assert main(["checkpoint", "verify", "run"]) == 1


def test_a_checkpoint_adds_no_file_to_an_export(here: Path) -> None:
    """Such as code, which whoever downloads the export might run, or a config with other keys."""
    extra = dict.fromkeys(("modeling_evil.py", "config.json", "README.md", "model.safetensors"), b"import os")
    for name, contents in extra.items():
        (STEP / "tokenizer" / name).write_bytes(contents)
    hashes = {name: hashlib.sha256(contents).hexdigest() for name, contents in extra.items()}
    change(STEP, tokenizer={**manifest(STEP)["tokenizer"], **hashes})
    assert main(["checkpoint", "convert", "run", "exported"]) == 0
    assert not Path("exported/modeling_evil.py").exists()
    assert Path("exported/tokenizer.json").read_bytes() == Path("theirs/tokenizer.json").read_bytes()
    assert [
        name for name in extra if Path("exported", name).exists() and Path("exported", name).read_bytes() == b"import os"
    ] == []


@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "tokenizer.json"])
def test_links_out_of_a_tokenizer_are_refused(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs", name).unlink(missing_ok=True)
    Path("theirs", name).symlink_to(Path("private", name).resolve())
    for source in ("run", "theirs"):
        assert main(["checkpoint", "convert", source, "exported", "--tokenizer", "theirs"]) == 2
        assert f"{name}: is a link to a file outside of" in capsys.readouterr().err and not Path("exported").exists()
    with pytest.raises(UserError, match="is a link to a file outside of"):
        run_recipe("llama3_debug", {**RUN, "job.dump_folder": "other"})
    assert published(here / "other") == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_links_out_of_a_model_are_refused(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs", name).unlink()
    Path("theirs", name).symlink_to(Path("private", name).resolve())
    assert main(["checkpoint", "convert", "theirs", "imported"]) == 2
    assert "is a link to a file outside of" in capsys.readouterr().err and not Path("imported").exists()


def test_the_layout_of_the_hub_s_cache_is_no_link_elsewhere(here: Path) -> None:
    snapshot = here / "hub/models--a--b/snapshots/0123"
    for folder in (snapshot, here / "hub/models--a--b/blobs"):
        folder.mkdir(parents=True)
    (snapshot / "additional_chat_templates").mkdir()
    for number, name in enumerate(contents("theirs")):
        shutil.move(Path("theirs", name), here / f"hub/models--a--b/blobs/{number}")
        (snapshot / name).symlink_to("../" * (2 + name.count("/")) + f"blobs/{number}")
    assert main(["checkpoint", "convert", str(snapshot), "imported"]) == 0
    assert manifest(Path("imported"))["tokenizer"] == manifest(STEP)["tokenizer"]
    run_recipe(
        "llama3_debug",
        {**RUN, "model.from_pretrained": str(snapshot), "model.tokenizer_path": str(snapshot), "job.dump_folder": "other"},
    )
    assert manifest(Path("other/checkpoint/step-1"))["tokenizer"] == manifest(STEP)["tokenizer"]


def test_a_push_takes_no_link(here: Path) -> None:
    Path("export").mkdir()
    Path("export/config.json").write_text("{}")
    assert _files(Path("export")) == [Path("export/config.json")]
    Path("export/model.safetensors").symlink_to(Path("private/id_rsa").resolve())
    with pytest.raises(OSError, match=r"model.safetensors is a link, and what it leads to is not published"):
        _files(Path("export"))
