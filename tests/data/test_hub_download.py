"""`titan tokenizer download` and `titan model download` against a hub on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import fake_hub
from harness.fake_hub import FakeHub, commit
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_data.model_hub import locate

TOKEN = "hf_abcdefghijklmnop"
COMMIT = commit("meta/Llama")
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": bytes(range(256)) * 400,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 300,
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"a pickle",
    "original/tokenizer.model": b"ranks",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "README.md": b"about",
    "LICENSE": b"terms",
}
FIRST = "model-00001-of-00002.safetensors"
RANKS = b"".join(base64.b64encode(number.to_bytes(3)) + b" %d\n" % number for number in range(128_000))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Iterator[FakeHub]:
    with fake_hub.running({"meta/Llama": MODEL}) as hub:
        fake_hub.use(hub.url, monkeypatch)
        yield hub


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_a_model_is_its_safetensors_configs_and_tokenizer(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "download", "meta/Llama", "--revision", "main"]) == 0
    folder = "assets/models/meta/Llama"
    unwanted = {"consolidated.safetensors", "pytorch_model.bin", "README.md"}
    assert names_in(folder) == {name for name in MODEL if "/" not in name} - unwanted
    assert all((Path(folder) / name).read_bytes() == MODEL[name] for name in names_in(folder))
    printed = capsys.readouterr()
    assert f"8 files of meta/Llama at {COMMIT[:7]}, 175." in printed.out
    assert "hashes verified" in printed.out
    assert f"titan generate {folder} --prompt" in printed.out
    assert f'model.from_pretrained = "{folder}"' in printed.out
    assert printed.err.startswith("downloading LICENSE, config.json, ") and "(175." in printed.err
    hub.requests.clear()
    assert main(["model", "download", "meta/Llama", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["commit"] == COMMIT
    assert found["config"] == {"model.from_pretrained": folder}
    assert {"name": FIRST, "bytes": 102_400} in found["files"]
    assert not hub.downloads("")
    assert locate("meta/Llama") == folder
    with pytest.raises(UserError, match="run `titan model download meta/Other`"):
        locate("meta/Other")


def test_a_tokenizer_is_stored_where_the_recipes_of_llama_expect_it(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["meta/Ranks"] = {"original/tokenizer.model": RANKS, "config.json": b"{}"}
    assert main(["tokenizer", "download", "meta/Ranks"]) == 0
    assert Path("assets/tokenizer/tokenizer.model").read_bytes() == RANKS
    assert names_in("assets/tokenizer") == {"tokenizer.model"}
    shown = capsys.readouterr().out
    assert '[model]\ntokenizer = "llama3"\ntokenizer_path = "assets/tokenizer/tokenizer.model"' in shown
    assert main(["tokenizer", "download", "meta/Llama", "--output", "t", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"model.tokenizer": "hf", "model.tokenizer_path": "t"}
    assert names_in("t") == {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}


def test_a_download_that_is_cut_resumes_in_the_same_call(hub: FakeHub) -> None:
    hub.cuts = [70_000]
    assert main(["model", "download", "meta/Llama"]) == 0
    assert any(wanted not in ("", "bytes=0-") for wanted in hub.downloads("model-"))
    assert (Path("assets/models/meta/Llama") / FIRST).read_bytes() == MODEL[FIRST]


def test_the_next_call_keeps_the_files_that_are_whole(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["meta/Llama"].pop("model-00002-of-00002.safetensors")
    hub.cuts = [70_000, *[0] * 5]
    assert main(["model", "download", "meta/Llama"]) == 2
    printed = capsys.readouterr().err
    assert "titan: error: meta/Llama: cannot be downloaded" in printed
    assert "run the same command again: it keeps the files that are whole" in printed
    folder = Path("assets/models/meta/Llama")
    assert names_in(str(folder)) == {".download"}
    hub.requests.clear()
    assert main(["model", "download", "meta/Llama"]) == 0
    assert hub.downloads(FIRST) == [""]
    assert not [one for one in hub.requests if one.method == "GET" and one.path.endswith("/tokenizer.json")]
    assert (folder / FIRST).read_bytes() == MODEL[FIRST]
    assert ".download" not in names_in(str(folder))


def test_a_model_is_recognised_only_when_it_is_whole(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (moved.append(self.name), replace(self, target))[1])
    assert main(["model", "download", "meta/Llama"]) == 0
    assert moved[-1] == "config.json" and FIRST in moved


@pytest.mark.parametrize("file", [FIRST, "tokenizer.json"])
def test_a_file_with_another_hash_is_removed(hub: FakeHub, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub.wrong = {file}
    assert main(["model", "download", "meta/Llama"]) == 2
    assert f"{file} does not match the hash that the hub reports for it" in capsys.readouterr().err
    assert not list(Path("assets").rglob(file))
    hub.wrong = set()
    assert main(["model", "download", "meta/Llama"]) == 0


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: FakeHub, in_tmp: Path) -> None:
    """In a process of its own, which reads the variables and logs as a user's does."""
    hub.token, hub.cuts = TOKEN, [50_000]
    plain = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    environment = {
        **plain,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(in_tmp / "home"),
    }
    command = [sys.executable, "-m", "titan_core", "model", "download", "meta/Llama"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sent = {request.path: "authorization" in request.headers for request in hub.requests}
    assert all(value for path, value in sent.items() if "meta/Llama" in path)
    assert [value for path, value in sent.items() if path.startswith("/storage/")] == [False, False]
    printed = done.stdout + done.stderr
    assert TOKEN not in printed
    assert fake_hub.SIGNATURE not in printed
    assert not [path for path in in_tmp.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize(
    ("change", "token", "message"),
    [
        ({"token": TOKEN, "gated": True}, "", "is gated; request access on its page, and set HF_TOKEN"),
        ({"token": TOKEN, "gated": True}, "hf_other", "is gated; request access on its page, and set HF_TOKEN"),
        ({"token": TOKEN}, "", "does not exist, or HF_TOKEN has no access to it; check the name, and set HF_TOKEN"),
        ({"token": TOKEN}, "hf_other", "does not exist, or HF_TOKEN has no access to it"),
        ({"repositories": {}}, "", "does not exist, or HF_TOKEN has no access to it"),
        ({"status": 403}, "", "does not exist, or HF_TOKEN has no access to it"),
        ({"status": 404}, "", "404"),
        ({"status": 429}, "", "429"),
        ({"status": 503}, "", "503"),
        ({"status": 200}, "", "cannot be downloaded: "),
        ({}, "hf_a b", "HF_TOKEN: is not an access token"),
        ({}, "hf_ä", "HF_TOKEN: is not an access token"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_without_the_token(
    hub: FakeHub,
    change: dict[str, object],
    token: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    monkeypatch.setenv("HF_TOKEN", token)
    for command in ("tokenizer", "model"):
        assert main([command, "download", "meta/Llama"]) == 2
        printed = capsys.readouterr().err
        assert message in printed.splitlines()[-1]
        assert printed.count("titan: ") == 1 and "Traceback" not in printed
        assert not token or token not in printed
    assert not list(Path().rglob("tokenizer*.json"))


def test_a_wrong_revision_or_name_is_refused(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "download", "meta/Llama", "--revision", "v9"]) == 2
    assert "meta/Llama: has no revision 'v9'; choose a branch, tag or commit" in capsys.readouterr().err
    Path("a/b/c").mkdir(parents=True)
    assert main(["model", "download", "a/b/c"]) == 2
    assert "write it as OWNER/NAME; a local folder needs no download" in capsys.readouterr().err


def test_without_a_network_the_error_says_what_to_check(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert "HF_HUB_OFFLINE is set; unset it" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert "meta/Llama: cannot be downloaded: " in capsys.readouterr().err
    monkeypatch.setenv("HTTP_PROXY", f"http://user:pass@127.0.0.1:{hub.url.rpartition(':')[2]}0")
    close_session()
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    printed = capsys.readouterr().err
    assert "check the network, proxy" in printed
    assert "pass@" not in printed
    monkeypatch.delenv("HTTP_PROXY")
    close_session()
    assert not Path("assets").exists()


def test_a_variable_with_an_invalid_value_is_reported(hub: FakeHub) -> None:
    command = [sys.executable, "-m", "titan_core", "model", "download", "meta/Llama"]
    environment = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "x"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("titan: error: meta/Llama: cannot be downloaded: invalid literal for int()")
    assert done.stderr.count("\n") == 1


def test_files_of_another_model_are_never_mixed_up_or_overwritten(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["other/Model"] = {"tokenizer.json": b"{}", "vocab.json": b"{}"}
    assert main(["tokenizer", "download", "other/Model"]) == 0
    changed = Path("assets/tokenizer/vocab.json")
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert f"tokenizer.json: differs from the file in meta/Llama at {COMMIT[:7]}" in capsys.readouterr().err
    Path("assets/tokenizer/tokenizer.json").write_bytes(MODEL["tokenizer.json"])
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert f"contains vocab.json, which meta/Llama at {COMMIT[:7]} does not have" in capsys.readouterr().err
    assert changed.read_bytes() == b"{}"
    assert main(["tokenizer", "download", "meta/Llama", "--force"]) == 0
    assert not changed.exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "reading a pickle runs the code in it"),
        ({"config.json": b"{}", "consolidated.safetensors": b""}, "has no weights in model*.safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "contains an adapter (LoRA), not a whole model"),
        ({"model.safetensors": b""}, "contains no config.json"),
    ],
)
def test_a_repository_without_a_model_in_safetensors_is_refused(
    hub: FakeHub, files: dict[str, bytes], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["meta/Llama"] = files
    assert main(["model", "download", "meta/Llama"]) == 2
    assert message in capsys.readouterr().err
    assert not hub.downloads("")


def test_a_repository_without_a_readable_tokenizer_is_refused(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["meta/Llama"] = {"vocab.json": b"{}"}
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert "neither tokenizer.json nor tokenizer.model (it has vocab.json)" in capsys.readouterr().err
    hub.repositories["meta/Llama"] = {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0"}
    assert main(["tokenizer", "download", "meta/Llama"]) == 2
    assert "is not a tokenizer that Titan reads (SentencePiece, for example)" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/api/models/", "/storage/"])
def test_a_hub_that_sends_byte_by_byte_is_given_up(
    path: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titan_data.hub._WITHIN_SECONDS", 0.5)
    hub.slow = path
    assert main(["model", "download", "meta/Llama"]) == 2
    assert "the hub sends less than 64.0 KiB in 0.5 s" in capsys.readouterr().err
    hub.slow = None
    assert main(["model", "download", "meta/Llama"]) == 0
