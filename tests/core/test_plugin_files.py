"""``titan --plugin FILE``: a plugin from a file that the user names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.plugins.registry import Components
from titan_core.toolkit.launching import shell_command
from titan_core.toolkit.plugin_files import VARIABLE, load_plugin_files, plugin_files, using_plugin_files
from titan_core.toolkit.worker_process import worker_processes

FILE = """
from titan_core.api import Dataset, Ref, hookimpl
from harness.letters import open_letters

api = (1, 0)


@hookimpl
def titan_datasets():
    return [Dataset(name="mine", summary="from a file", build=Ref("my_plugin:build"))]


def build(context):
    return open_letters(context)


def answer():
    return 42
"""
MINE = {"training.dataset": "mine", "training.dataset_path": ",".join(["99"] * 16), "training.steps": "1"}


@pytest.fixture
def file(in_tmp: Path) -> Iterator[Path]:
    path = in_tmp / "my_plugin.py"
    path.write_text(FILE)
    yield path
    assert VARIABLE not in os.environ
    assert "my_plugin" not in sys.modules


def train(*more: str) -> list[str]:
    return ["train", "tiny", *(f"--{key}={value}" for key, value in MINE.items()), *more]


def test_a_plugin_file_is_listed_with_its_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plugin", "my_plugin.py", "plugins", "--json"]) == 0
    (mine,) = [one for one in json.loads(capsys.readouterr().out)["plugins"] if one["name"] == "my_plugin"]
    digest = sha256(file.read_bytes()).hexdigest()
    assert (mine["distribution"], mine["version"]) == ("my_plugin.py", f"sha256:{digest}")
    assert [one["name"] for one in mine["provides"]] == ["mine"]
    assert main(["plugins", "--json"]) == 0
    assert "my_plugin" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_a_run_uses_and_records_it(file: Path, workers: str) -> None:
    """The data worker, a process of its own, finds the dataset's code too."""
    command = [sys.executable, "-m", "titan_core", "--plugin=my_plugin.py", *train(f"--data.num_workers={workers}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = Path("outputs").iterdir()
    recorded = {plugin["name"]: plugin["version"] for plugin in json.loads((run / "plugins.json").read_text())}
    assert recorded["my_plugin"] == f"sha256:{sha256(file.read_bytes()).hexdigest()}"


def test_a_job_without_it_has_no_such_dataset(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "show", *train()[1:]]) == 2
    assert "no installed plugin provides this dataset" in capsys.readouterr().err


def test_the_job_of_other_code_has_another_digest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By which ranks find that one of them would run other code."""
    digests = []
    for text in (FILE, FILE, FILE + "# changed\n"):
        file.write_text(text)
        assert main(["--plugin", "my_plugin.py", "job", "show", *train()[1:], "--json"]) == 0
        digests.append(json.loads(capsys.readouterr().out)["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_workers_load_exactly_the_code_of_the_command(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with using_plugin_files(["my_plugin.py"]):
        Components.from_installed()
        with worker_processes(1) as pool:
            assert pool.submit(sys.modules["my_plugin"].answer).result() == 42


def test_a_file_that_changes_after_the_start_is_refused(file: Path) -> None:
    with using_plugin_files(["my_plugin.py"]):
        file.write_text(FILE + "# changed\n")
        with pytest.raises(
            UserError, match=r"my_plugin\.py: has changed since the command started; start the command again"
        ):
            Components.from_installed()


def test_suggested_commands_name_it(file: Path) -> None:
    with using_plugin_files(["my_plugin.py"]):
        assert f"--plugin {file} report" in shell_command(["report"])
        assert [one.path for one in plugin_files()] == [file]
        assert load_plugin_files()[0][1] is load_plugin_files()[0][1]


MISTAKES = {
    "missing": ("my_plugni.py", None, "no such file; did you mean 'my_plugin.py'?"),
    "a folder": ("folder.py", None, "is not a file; name a Python file"),
    "a pipe": ("pipe.py", None, "is not a file; name a Python file"),
    "no Python": ("my-plugin.py", FILE, "is not the name of a Python module, such as my_formats.py; rename the file"),
    "another ending": ("plugin.txt", FILE, "is not the name of a Python module"),
    "raises": ("bad.py", "1 / 0", "importing it raised ZeroDivisionError: division by zero; fix the file"),
    "exits": ("bad.py", "raise SystemExit(3)", "importing it raised SystemExit: 3"),
    "no syntax": ("bad.py", "def", "importing it raised SyntaxError: "),
    "no version": ("bad.py", "x = 1", "it declares no contract version"),
    "another version": ("bad.py", "api = (9, 0)", "it needs contract version 9.0"),
    "no hooks": ("bad.py", "api = (1, 0)", "has no hooks, so it would do nothing; define one"),
    "misspelt hook": ("bad.py", FILE.replace("titan_datasets", "titan_datasetz"), "titan_datasetz"),
    "a hook that raises": (
        "bad.py",
        FILE.replace("return [", "return 1 / 0, ["),
        "hook titan_datasets raised ZeroDivisionError",
    ),
    "the name of a library": ("random.py", FILE, "has the name of another module, 'random', which it would hide; rename"),
    "the name of ours": ("titan_core.py", FILE, "has the name of another module, 'titan_core'"),
    "no value": ("", None, "needs a value"),
}


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, message = MISTAKES[case]
    Path("folder.py").mkdir()
    os.mkfifo("pipe.py")
    if text is not None:
        Path(name).write_text(text)
    assert main(["--plugin", name, "plugins"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("titan: error: ") and "--plugin" in line
    assert message in line


def test_two_files_of_one_name_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    Path("other/my_plugin.py").write_text(FILE)
    assert main(["--plugin", "my_plugin.py", "--plugin", "other/my_plugin.py", "plugins"]) == 2
    assert "is the second plugin file named 'my_plugin'" in capsys.readouterr().err


def test_the_option_belongs_before_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--plugin", "my_plugin.py"]) == 2
    assert "write it before the command: titan --plugin FILE plugins ..." in capsys.readouterr().err
