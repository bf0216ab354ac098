"""What a run leaves to its user: a warning if it saves no weights, and commands to continue with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titan_core.api import RunEnd, hookimpl
from titan_core.api._shown import printable
from titan_core.api.observe.events import NextCommand
from titan_core.loop.results import last_checkpoint, print_next_commands
from titan_core.loop.training import train
from titan_core.plugins.lifecycle import Lifecycle
from titan_core.toolkit.launching import COMMAND, shell_command, user_command
from titan_testing.jobs import TINY, make_job


def test_without_a_checkpoint_plugin_the_start_says_that_no_weights_are_saved(
    in_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(make_job("tiny", TINY))
    expected = "the trained weights will not be saved: install titan-ckpt, and set checkpoint.enable = true"
    assert caplog.messages.count(expected) == 1


class Store:
    def __init__(self, newest: tuple[int, str] | None) -> None:
        self.newest = newest


@pytest.mark.parametrize(
    ("newest", "line"), [((2, "c/step-2"), "the newest checkpoint is of step 2"), (None, "there is no checkpoint")]
)
def test_a_store_that_omits_the_last_step_is_reported(
    newest: tuple[int, str] | None, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    store: Any = Store(newest)
    assert last_checkpoint(store, RunEnd(4, True, "")) is None
    assert caplog.messages == [f"the weights after step 4 were not saved: {line}"]
    store = Store((4, "c/step-4"))
    assert last_checkpoint(store, RunEnd(4, True, "")) == "c/step-4"
    assert len(caplog.messages) == 1


def suggesting(answer: Any) -> object:
    class Suggests:
        @hookimpl
        def titan_next_commands(self, end: RunEnd) -> Any:
            return answer

    return Suggests()


def test_next_commands_are_those_of_all_plugins_quoted_for_the_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr("sys.argv", ["/venv/bin/titan", "train"])
    job: Any = None
    end = RunEnd(4, True, "")
    one = NextCommand("look", ("report", "my run"))
    other = NextCommand("go on", ("train", "--a.b", "it's"))
    commands = Lifecycle([suggesting([other]), suggesting(None), suggesting((one,))]).next_commands(job, end, None)
    assert commands == [one, other]
    print_next_commands(commands)
    assert capsys.readouterr().out == "next:\n  look   titan report 'my run'\n  go on  titan train --a.b 'it'\"'\"'s'\n"
    print_next_commands([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("answer", ["titan report", ["titan report"], 3])
def test_other_answers_are_refused(answer: Any) -> None:
    job: Any = None
    with pytest.raises(ValueError, match=r"titan_next_commands returned .* must return a list of NextCommand"):
        Lifecycle([suggesting(answer)]).next_commands(job, RunEnd(4, True, ""), None)


@pytest.mark.parametrize(
    ("program", "environment", "expected"),
    [
        ("/venv/bin/titan", {}, (["titan"], ["train", "x"])),
        ("/venv/bin/titan", {"UV_RUN_RECURSION_DEPTH": "1"}, (["uv", "run", "titan"], ["train", "x"])),
        ("/site/titan_core/__main__.py", {}, (["python", "-m", "titan_core"], ["train", "x"])),
        ("/site/titan_core/__main__.py", {"RANK": "0"}, (["python", "-m", "titan_core"], None)),
        (
            "/site/titan_core/__main__.py",
            {"RANK": "0", COMMAND: json.dumps((["titan"], ["train", "--nproc-per-node", "2"]))},
            (["titan"], ["train", "--nproc-per-node", "2"]),
        ),
    ],
)
def test_commands_start_as_the_user_started_this_one(
    program: str, environment: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UV_RUN_RECURSION_DEPTH", "RANK", COMMAND):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [program, "train", "x"])
    assert user_command() == expected
    assert shell_command(["a b"]) == " ".join([*expected[0], "'a b'"])


def test_secrets_are_left_out_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["titan", "train", "--site.api_key", "s3cret"])
    assert "s3cret" not in str(user_command())


def test_a_terminal_obeys_nothing_that_a_model_wrote() -> None:
    assert printable("a\tb\n\x1b[31mred\x07 naïve 🙂") == "a   b\n\\x1b[31mred\\x07 naïve 🙂"
    assert printable("\x9b2J \u202e\ud800") == "\\x9b2J \\u202e\\ud800"
    joined = "👩\u200d🚀 می\u200cروم\u3000日本\xa0%"
    assert printable(joined) == joined
