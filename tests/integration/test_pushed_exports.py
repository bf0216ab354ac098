"""Exports that are pushed to a hub: what arrives is the folder, and whatever the hub does leaves training as it was. The hub
is one on this machine; it has LFS, not Xet."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.fake_hub import FakeHub, running, use
from harness.fake_hub_uploads import Commit, Fault
from titan_ckpt.foreign import hub_push
from titan_ckpt.foreign.hub_push import HubRepository
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_testing.jobs import make_job, run_recipe

NAME, TOKEN = "me/my-model", "hf_s3cr3ttoken"
SETTINGS: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 1, n_heads = 2, n_kv_heads = 1, ffn_dim = 32, vocab_size = 288, max_seq_len = 64}",
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 2,
    "training.steps": 2,
    "checkpoint.enable": "true",
    "checkpoint.interval": 2,
    "job.device": "cpu",
    "job.dump_folder": "run",
}
PUSHED = {**SETTINGS, "checkpoint.export": "hf", "checkpoint.export_push": NAME}
COMMIT = f"/api/models/{NAME}/commit/"


@pytest.fixture
def hub(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running({}) as found:
        found.token = TOKEN
        use(found.url, monkeypatch)
        for name, value in {"HF_ENDPOINT": found.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        yield found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("titan_ckpt")
    ]


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    (in_tmp / "export").mkdir()
    for name, data in {
        "config.json": b"{}",
        "README.md": b"---\ntags: [titan]\n---\n",
        "model.safetensors": b"1" * 4000,
    }.items():
        (in_tmp / "export" / name).write_bytes(data)
    return in_tmp / "export"


def test_a_repository_has_the_files_of_the_last_folder_and_its_own(hub: FakeHub, folder: Path) -> None:
    own = {"LICENSE": b"mine", "tf_model.h5": b"2"}
    stale = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"old"}
    hub.repositories[NAME] = {**own, **stale, "config.json": b"old"}
    address = HubRepository(NAME, "--push").push(folder, "step 7")
    assert address.startswith(f"{hub.url}/{NAME}/commit/")
    assert hub.repositories[NAME] == {**own, **contents(folder)}
    assert hub.uploads.commits == [Commit(NAME, "step 7", frozenset(contents(folder)), frozenset(stale))]
    assert hub.uploads.private == {}  # an existing repository remains what it was


FAULTS = {
    "401": (Fault("preupload", 401), "401"),
    "403": (Fault("preupload", 403), "403"),
    "500": (Fault("commit/main", 500), "500"),
    "dies": (Fault("^/upload/", after=1000), "uploading 'model.safetensors'"),
    "storage": (Fault("^/upload/", 507), "507"),
    "echo": (Fault("commit/main", 403, says=f"{TOKEN} may not"), "(redacted) may not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_push_that_fails_is_one_error_with_its_cause_and_a_command(hub: FakeHub, folder: Path, fault: str) -> None:
    hub.repositories[NAME] = {"config.json": b"old"}
    before = contents(folder)
    hub.uploads.faults, cause = [FAULTS[fault][0]], FAULTS[fault][1]
    with pytest.raises(UserError) as caught:
        HubRepository(NAME, "--push").push(folder, "step 7")
    text = str(caught.value)
    assert f"is not pushed to {NAME}: " in text and cause in text and "\n" not in text and TOKEN not in text
    assert text.endswith(f"; push it later: `hf upload {NAME} {folder} .`")
    assert contents(folder) == before and hub.repositories[NAME] == {"config.json": b"old"}
    hub.uploads.faults.clear()
    HubRepository(NAME, "--push").push(folder, "step 7")
    assert hub.repositories[NAME] == before


def test_a_hub_that_does_not_answer_is_given_up(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_session

    hub.uploads.stalls = True
    monkeypatch.setattr(hub_push, "_STALLED_SECONDS", 0.2)
    try:
        with pytest.raises(UserError, match=r"is not pushed to me/my-model: .*timed out"):
            HubRepository(NAME, "--push").push(folder, "step 7")
    finally:
        hub.uploads.stalls = False
    assert get_session().timeout.read is None  # that of others is theirs


def test_a_token_that_may_not_write_is_refused_before_the_first_step(hub: FakeHub) -> None:
    for read_only, token, cause in ((True, TOKEN, "403"), (False, "hf_other", "401")):
        hub.repositories[NAME] = {}
        hub.uploads.read_only, hub.token = read_only, token
        with pytest.raises(UserError) as caught:
            run_recipe("llama3_debug", PUSHED)
        text = str(caught.value)
        assert text.startswith(f"checkpoint.export_push = '{NAME}': ") and cause in text
        assert text.endswith(f"; set HF_TOKEN to a token that may write to {NAME}") and TOKEN not in text
        assert not Path("run/checkpoint").exists() or not list(Path("run/checkpoint").glob("step-*"))


def test_a_name_that_the_hub_does_not_allow_is_refused(hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"export_push = 'me/a--b': Cannot have -- .*; check the name, and HF_ENDPOINT"):
        HubRepository("me/a--b", "checkpoint.export_push").require_access()


@pytest.mark.quick_rows(2)
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("HF_TOKEN", "", "needs an access token, and HF_TOKEN is not set; set HF_TOKEN to a token that may write to"),
        ("HF_TOKEN", "hf_1 hf_2", "HF_TOKEN: is not an access token: it contains a blank"),
        ("offline", "", "needs the hub, but HF_HUB_OFFLINE is set; unset one of them"),
        ("missing", "", "needs the package huggingface-hub, which is not installed; install it: "
                        "`uv pip install 'huggingface-hub>=1.20'`"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_before_anything_is_written(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    from huggingface_hub import constants

    if variable == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif variable == "missing":
        monkeypatch.setattr(hub_push, "find_spec", lambda name: None)
    else:
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as caught:
        run_recipe("llama3_debug", PUSHED)
    assert says in str(caught.value) and "hf_1 hf_2" not in str(caught.value)
    assert hub.requests == [] and not list(Path("run/checkpoint").glob("step-*"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"checkpoint.export_push": "my-model"}, "checkpoint.export_push"),
        ({"checkpoint.export_push": NAME}, "export_push would have no effect without"),
    ],
)
def test_a_key_without_effect_is_refused(in_tmp: Path, setting: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_job("llama3_debug", {**SETTINGS, **setting})


def test_a_hub_that_is_down_at_the_start_is_one_warning(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    hub.uploads.faults = [Fault("whoami", 502)]
    with caplog.at_level(logging.WARNING):
        HubRepository(NAME, "checkpoint.export_push").require_access()
    (line,) = warnings_of(caplog)
    assert line.startswith("checkpoint.export_push = 'me/my-model': the hub cannot be checked now; training begins: ")
    assert "502" in line and TOKEN not in line


@pytest.mark.full
def test_each_export_is_pushed(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_recipe("llama3_debug", PUSHED)
    assert hub.repositories[NAME] == contents(Path("run/hf/step-2"))
    assert hub.uploads.private == {NAME: True}
    assert [commit.message for commit in hub.uploads.commits] == ["step 2"]
    lines = [record.getMessage() for record in caplog.records]
    assert f"pushed step 2 to {NAME}" in lines and warnings_of(caplog) == []
    assert TOKEN not in caplog.text


@pytest.mark.full
def test_a_push_that_fails_leaves_training_as_it_was_and_the_next_export_is_pushed(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run_recipe("llama3_debug", {**SETTINGS, "job.dump_folder": "plain"})
    hub.uploads.faults = [Fault("commit/main", 403)]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        record = run_recipe("llama3_debug", PUSHED)
    assert record.losses == plain.losses
    exported = Path("run/hf/step-2").resolve()
    (line,) = warnings_of(caplog)
    assert line.startswith(f"training continues: {exported}: is not pushed to {NAME}: ") and "403" in line
    assert line.endswith(f"; push it later: `hf upload {NAME} {exported} .`") and TOKEN not in line
    assert (exported / "model.safetensors").exists() and hub.repositories[NAME] == {}
    hub.uploads.faults.clear()
    run_recipe("llama3_debug", {**PUSHED, "training.steps": 4})
    assert hub.repositories[NAME] == contents(Path("run/hf/step-4"))


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault("^/upload/", after=1000), Fault("^/upload/", 500)], ids=["dies", "500"])
def test_an_upload_that_fails_leaves_training_as_it_was(
    hub: FakeHub, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    """``huggingface_hub`` repeats these for half a minute, which the end of the run waits for."""
    plain = run_recipe("llama3_debug", {**SETTINGS, "job.dump_folder": "plain"})
    hub.uploads.faults = [fault]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        record = run_recipe("llama3_debug", PUSHED)
    assert record.losses == plain.losses and len(warnings_of(caplog)) == 1
    assert contents(Path("run/hf/step-2")) and hub.repositories[NAME] == {}


def test_the_command_pushes_what_it_writes(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    run_recipe("llama3_debug", SETTINGS)
    capsys.readouterr()
    convert = ["checkpoint", "convert", "run/checkpoint/step-2"]
    assert main([*convert, "exported", "--push", NAME]) == 0
    printed = capsys.readouterr()
    wrote, listed, pushed = printed.out.splitlines()
    assert wrote == "wrote exported" and pushed.startswith(f"pushed {hub.url}/{NAME}/commit/") and TOKEN not in printed.err
    assert listed.startswith(f"pushing to {NAME}: {', '.join(sorted(contents(Path('exported'))))} (")
    assert hub.repositories[NAME] == contents(Path("exported"))
    assert hub.uploads.commits[0].message == "step 2" and hub.uploads.private == {NAME: True}
    hub.uploads.faults = [Fault("commit/main", 403)]
    assert main([*convert, "again", "--dtype", "bfloat16", "--push", NAME]) == 2
    assert "titan: error: again: is not pushed to me/my-model" in capsys.readouterr().err and Path("again").exists()
    for wrong, says in (
        (["--push", "me"], "is not the name of a repository"),
        (["--to", "dcp", "--push", NAME], "no effect"),
    ):
        assert main([*convert, "wrong", *wrong]) == 2
        assert says in capsys.readouterr().err and not Path("wrong").exists()
