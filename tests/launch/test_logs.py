"""The logs of the ranks, and what is printed of them. Scripts without torch take the place of the ranks."""

from __future__ import annotations

import os
import pty
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from harness.agents import RANK_0, agent_of
from harness.quick import rows
from harness.terminal import Screen
from titan_core.api import UserError
from titan_core.toolkit.status import current_phase
from titan_launch.agent import Agent
from titan_launch.options import shown_ranks
from titan_launch.ranks.logs import RankLogs, _Log
from titan_launch.terminal.console import Console, Shown

TALK = """
print("out of", rank, flush=True)
os.write(2, f"C++ of {rank}\\n".encode())
"""
pytestmark = pytest.mark.usefixtures("environment", "handlers")


def run(agent: Agent) -> None:
    agent.run()
    agent.logs.end_attempt()
    agent.console.close()
    assert current_phase() is None


def log(folder: Path, name: str) -> str:
    return (folder / "logs" / name).read_text()


def test_each_rank_has_a_log_and_rank_0_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(agent_of(tmp_path, TALK))
    assert [log(tmp_path, f"rank-{rank}.log") for rank in (0, 1)] == ["out of 0\nC++ of 0\n", "out of 1\nC++ of 1\n"]
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("out of 0\n", "C++ of 0\n")


@pytest.mark.parametrize(
    ("tee", "seen"), [("1", {"[rank 1] "}), ("all", {"[rank 0] ", "[rank 1] "}), ("0,1", {"[rank 0] ", "[rank 1] "})]
)
def test_ranks_that_are_printed_have_a_prefix(
    tee: str, seen: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(agent_of(tmp_path, TALK, shown=shown_ranks(tee, 2)))
    printed = capfd.readouterr()
    assert {line.partition("out of")[0] for line in printed.out.splitlines()} == seen
    assert {line.partition("C++")[0] for line in printed.err.splitlines()} == seen
    assert log(tmp_path, "rank-1.log") == "out of 1\nC++ of 1\n"


@pytest.mark.parametrize("tee", ["2", "-1", "0,", "", "one", "1-0", "0-2", "9" * 5000])
def test_ranks_that_do_not_exist_cannot_be_printed(tee: str) -> None:
    with pytest.raises(UserError, match="is not a rank or a range of ranks from 0 to 1; use for example --tee 0,2-3"):
        shown_ranks(tee, 2)


def test_ranges_of_ranks() -> None:
    assert shown_ranks("0,2-4", 8) == Shown(frozenset({0, 2, 3, 4}), prefixed=True)
    assert shown_ranks(None, 8) == RANK_0


CRASHES = {
    "abort": ('os.write(2, b"terminate called\\n"); os.abort()', "terminate called\n", "SIGABRT"),
    "traceback": ("raise ValueError('no')", "ValueError: no\n", "exited with status 1 and recorded no reason"),
    "no end of line": ('os.write(2, b"the last words"); os._exit(4)', "the last words\n", "exited with status 4"),
    "kill": ('os.write(1, b"x" * 300_000 + b"\\n"); os.kill(os.getpid(), signal.SIGKILL)', "x" * 300_000 + "\n", "SIGKILL"),
}


@pytest.mark.parametrize("crash", rows(CRASHES, ["traceback", "no end of line"]))
def test_what_a_rank_wrote_before_it_crashed_is_in_its_log(crash: str, tmp_path: Path) -> None:
    code, words, why = CRASHES[crash]
    agent = agent_of(tmp_path, f"if rank == 1:\n    {code}\ntime.sleep(0)")
    run(agent)
    assert log(tmp_path, "rank-1.log").endswith(words)
    assert agent.failure is not None
    assert why in agent.failure.lines[-1] and f"see {tmp_path / 'logs/rank-1.log'}" in agent.failure.lines[-1]


@pytest.mark.full
def test_the_logs_of_restarts_are_kept_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-1.log").write_text("of an earlier job")
    run(agent_of(tmp_path, 'print("attempt", attempt, flush=True); sys.exit(7)', restarts=2))
    assert log(tmp_path, "attempt-1/rank-1.log") == "of an earlier job"
    assert log(tmp_path, "attempt-2/rank-1.log") == log(tmp_path, "attempt-2/rank-0.log") == "attempt 0\n"
    assert log(tmp_path, "attempt-3/rank-1.log") == "attempt 1\n"
    assert log(tmp_path, "rank-1.log") == "attempt 2\n"
    folder = tmp_path / "logs/attempt-2/rank-0.log"
    assert f"recorded no reason; see {folder}; restarting (attempt 2 of 3)" in capfd.readouterr().err


@pytest.mark.full
def test_the_traceback_that_a_rank_logged_is_named_where_it_moves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
    log = os.path.dirname(os.environ["TITAN_OUTCOMES"]) + "/logs/rank-0.log"
    open(log, "a").write("Traceback\\n")
    leave(problems=["ValueError: no"], log=log)
    sys.exit(1)
    """
    run(agent_of(tmp_path, script, ranks=1, restarts=1))
    moved = tmp_path / "logs/attempt-1/rank-0.log"
    assert f"the traceback is in {moved}; restarting" in capfd.readouterr().err
    assert moved.read_text() == log(tmp_path, "rank-0.log") == "Traceback\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--log-dir x: .*file/logs cannot be written: Not a directory; choose another"):
        RankLogs(tmp_path / "file/logs", "--log-dir x", Console(), RANK_0)


def test_a_full_disk_is_reported_once_and_the_job_continues(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    full = _Log(Path("/dev/full"), Console())
    full.write(b"one\n")
    full.write(b"two\n")
    assert (
        capfd.readouterr().err == "titan: warning: /dev/full cannot be written: No space left on device; the job continues\n"
    )
    with (tmp_path / "log").open("wb") as file:
        os.dup2(file.fileno(), full._descriptor)
        full.write(b"three\n")
    full.close()
    assert (tmp_path / "log").read_text() == "[titan: 8 bytes could not be written here]\nthree\n"


class OwnTerminal:
    """A terminal of this process, which a thread reads."""

    def __init__(self) -> None:
        self._reader, self._writer = pty.openpty()
        self._written = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.console = Console(descriptors=(self._writer, self._writer))

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self._reader, 65536):
                self._written += data

    def end(self) -> Screen:
        """Return the screen, with the cursor's place marked."""
        os.write(self._writer, b"$ ")
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
        screen = Screen(80)
        screen.feed(self._written.decode())
        return screen


BAR = 'os.write(1, b"step 1\\n\\r\\x1b[?25l  bar 50%\\x1b[K\\r")'
ENDINGS = {
    "return": "pass",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "abort": "os.abort()",
    "exit": "sys.exit(1)",
    "interrupt": "os.kill(os.getppid(), signal.SIGINT); stay()",
}


@pytest.mark.parametrize("ending", rows(ENDINGS, ["kill", "interrupt"]))
def test_the_bar_of_a_rank_that_ends_is_erased(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = OwnTerminal()
    script = f"""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert os.isatty(1) and os.isatty(2)
    {BAR}
    {ENDINGS[ending]}
    """
    agent = agent_of(tmp_path, script, ranks=1, console=terminal.console)
    run(agent)
    screen = terminal.end()
    said = "" if agent.failure is None else agent.failure.lines[-1]
    if ending == "interrupt":
        said = "interrupted"
    first, *lines, last = [row for row in screen.rows if row]
    assert (first, last) == ("step 1", "$ ")
    assert "".join(lines).replace(" ", "") == (f"titan:{said}".replace(" ", "") if said else "")  # wrapped
    assert screen.cursor_is_visible
    assert log(tmp_path, "rank-0.log") == "step 1\n"


def test_lines_of_other_ranks_and_of_cpp_appear_above_a_bar() -> None:
    terminal = OwnTerminal()
    stdout = terminal.console.stdout
    stdout.raw(b"step 1\n\r  a bar 50%\r")
    stdout.line(b"[rank 1] hello")
    stdout.raw(b"\r  a bar 60%\r")
    stdout.raw(b"C++\n")
    stdout.raw(b"\r  a bar 70%\r")
    stdout.raw(b"\r\x1b[2Kstep 2\n\r  a bar 80%\r")
    terminal.console.say("failed")
    assert [row for row in terminal.end().rows if row] == [
        "step 1", "[rank 1] hello", "C++", "step 2", "titan: failed", "$ ",
    ]  # fmt: skip
