"""Files that others may have written are opened by one function, which no pipe, device, link or size surprises."""

from __future__ import annotations

import ast
import glob
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from ci.workspace import ROOT
from titan_ckpt.foreign.config import weight_map
from titan_ckpt.foreign.dcp_metadata import read_metadata
from titan_ckpt.foreign.files import MetaFiles, SafetensorsFiles
from titan_ckpt.format.folder import Folder
from titan_ckpt.format.manifest import read_manifest
from titan_ckpt.format.stored import NAME, BrokenCheckpoint
from titan_core.api import UserError
from titan_core.cli.main import main
from titan_core.config.load import read_raw
from titan_core.plugins.discovery import Discovery
from titan_core.plugins.registry import Components
from titan_core.toolkit.files import open_file, read_bytes, read_text, regular
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.runs.files import CONFIG, EVENTS, METRICS, PLUGINS
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.runs.tail import Tail
from titan_data.storage import matching
from titan_data.tokenized import read_index
from titan_data.tokenizers.chat_template import ChatTemplate
from titan_data.tokenizers.folder import TokenizerFolder
from titan_debug.crash.report import Report, _read_crashes
from titan_debug.flight.dump import RANK_FILE
from titan_debug.flight.stacks import STACKS_FILE
from titan_debug.profiling.traces import TraceEvents
from titan_report.followed_run import FollowedRun

HOME = "titan-core/src/titan_core/api/_files.py"
READERS = {
    "open", "os.open", "io.open", "gzip.open", "bz2.open", "lzma.open", "tokenize.open", "system.open", "os.fdopen",
    "mmap.mmap", "torch.load", "numpy.load", "numpy.memmap", "numpy.fromfile", "numpy.loadtxt", "numpy.genfromtxt",
}  # fmt: skip
"""Functions that open a file to read."""
METHODS = {"read_text", "read_bytes", "safe_open", "load_file", "memory_map", "OSFile", "from_file", "from_pretrained"}
"""Methods and functions of libraries that do, wherever they come from."""
LAST = {name.rpartition(".")[2] for name in READERS} | METHODS
MAYBE = re.compile(rf"\b({'|'.join(sorted(LAST))})\(")
OURS = {"read_text", "read_bytes"}

KERNEL = "files of the kernel, whose paths are constants"
SHIPPED = "a file that the package ships"
OWN = "what this process, or one that it has started, has written itself"
CACHE = "in the cache folder of this user"
CHECKED = "checked by regular() in the same expression"

KNOWN: dict[str, tuple[int, str]] = {
    # file (below packages/): number of sites, reason
    "titan-ckpt/src/titan_ckpt/foreign/files.py": (2, CHECKED),
    "titan-ckpt/src/titan_ckpt/foreign/dcp_files.py": (1, "bytes that open_file has read"),
    "titan-ckpt/src/titan_ckpt/format/folder.py": (
        2,
        "a folder that is not on this machine; written before, and made durable",
    ),
    "titan-ckpt/src/titan_ckpt/format/new_folder.py": (1, "written before, and made durable"),
    "titan-cluster/src/titan_cluster/rendering.py": (1, SHIPPED),
    "titan-completion/src/titan_completion/recipe_copy.py": (1, SHIPPED),
    "titan-testing/src/titan_testing/cli/new.py": (1, SHIPPED),
    "titan-testing/src/titan_testing/checks/formats.py": (3, OWN),
    "titan-testing/src/titan_testing/gloo_pool.py": (2, OWN),
    "titan-completion/src/titan_completion/cli.py": (2, SHIPPED),
    "titan-core/src/titan_core/api/plugins/component.py": (1, SHIPPED),
    "titan-core/src/titan_core/config/load.py": (1, SHIPPED),
    "titan-core/src/titan_core/data/stdlib.py": (1, "Python's own sources"),
    "titan-core/src/titan_core/plugins/installing.py": (1, "the metadata of an installed distribution"),
    "titan-core/src/titan_core/plugins/providers.py": (1, "the metadata of an installed distribution"),
    "titan-core/src/titan_core/toolkit/device.py": (1, KERNEL),
    "titan-core/src/titan_core/toolkit/folder_lock.py": (2, "a lock that this process holds; the kernel's"),
    "titan-core/src/titan_core/toolkit/own_files.py": (2, "a folder; with the flags of its caller, to write"),
    "titan-core/src/titan_core/toolkit/output.py": (1, "the null device, in place of a closed descriptor"),
    "titan-core/src/titan_core/toolkit/processes.py": (1, KERNEL),
    "titan-core/src/titan_core/toolkit/runs/child_runs.py": (1, OWN),
    "titan-data/src/titan_data/chat/source.py": (1, "opens no file: the method of a tokenizer's spec"),
    "titan-data/src/titan_data/file_index.py": (4, CACHE),
    "titan-data/src/titan_data/made_once.py": (3, "methods of the same name, which open files in the cache folder"),
    "titan-data/src/titan_data/mapped_files.py": (1, "what open_file has opened"),
    "titan-data/src/titan_data/template_worker.py": (1, KERNEL),
    "titan-debug/src/titan_debug/doctor/gpus.py": (1, KERNEL),
    "titan-debug/src/titan_debug/doctor/machine.py": (3, KERNEL),
    "titan-debug/src/titan_debug/doctor/network.py": (2, KERNEL),
    "titan-debug/src/titan_debug/profiling/profiler.py": (1, OWN),
    "titan-debug/src/titan_debug/stragglers.py": (1, KERNEL),
    "titan-ft/src/titan_ft/run_state.py": (1, "bytes that a replica group has sent"),
    "titan-launch/src/titan_launch/ranks/attempt.py": (1, OWN),
    "titan-launch/src/titan_launch/ranks/numa.py": (2, KERNEL),
    "titan-launch/src/titan_launch/ranks/progress.py": (3, OWN),
    "titan-models-hf/src/titan_models_hf/transformers_private.py": (1, OWN),
    "titan-models-hf/src/titan_models_hf/cache.py": (2, f"{CACHE}, and its own sources"),
    "titan-report/src/titan_report/page.py": (1, SHIPPED),
    "titan-simulate/src/titan_simulate/calibrate/calibrate.py": (1, KERNEL),
    "titan-simulate/src/titan_simulate/calibrate/ranks.py": (1, KERNEL),
    "titan-simulate/src/titan_simulate/cli/explained_page.py": (1, SHIPPED),
    "titan-simulate/src/titan_simulate/engine/stub_libraries.py": (1, SHIPPED),
}


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if last not in LAST:
            continue
        name = ast.unparse(node.func)
        given = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        words = [one.value for value in given for one in ast.walk(value) if isinstance(one, ast.Constant)]
        modes = [word for word in words if isinstance(word, str) and set(word) <= set("rwxab+t")]
        if any(set(mode) & set("wxa") for mode in modes) or "O_WRONLY" in ast.unparse(node):
            continue  # a file that is written
        method = last == "open" and (modes or not node.args)
        if name not in OURS and (name in READERS or last in METHODS or method):
            yield name


def test_one_module_opens_files_to_read() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "packages").rglob("src/**/*.py")):
        name = file.relative_to(ROOT / "packages").as_posix()
        text = file.read_text(encoding="utf-8")
        sites = list(calls(ast.parse(text))) if MAYBE.search(text) else []
        if name != HOME and len(sites) != KNOWN.get(name, (0, ""))[0]:
            found[name] = sites
    assert found == {}, "open files of others by titan_core.toolkit.files"


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """End a test that waits for a pipe."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(file: Path) -> Path:
    os.mkfifo(file)
    return file


def device(file: Path) -> Path:
    file.symlink_to("/dev/zero")
    return file


@pytest.mark.parametrize(
    ("make", "why"),
    [(pipe, "is not a regular file, but a pipe: write its contents to a file"), (device, "is not a regular file")],
)
def test_pipes_and_devices_are_refused_at_once(make: Callable[[Path], Path], why: str, tmp_path: Path) -> None:
    file = make(tmp_path / "file")
    for read in (open_file, read_bytes, read_text, regular):
        with pytest.raises(OSError, match=f"{why}: '"):
            read(file)
    with pytest.raises(UserError, match=f"cannot be read: {why}; "):
        read_object(file, "fix it")


def test_a_recipe_that_a_shell_substitutes_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``titan train <(sed ... recipe.toml)`` names it."""
    reading, writing = os.pipe()
    try:
        assert main(["train", f"/dev/fd/{reading}"]) == 2
    finally:
        os.close(reading)
        os.close(writing)
    why = f"/dev/fd/{reading}: cannot be read: is not a regular file, but a pipe: write its contents to a file; "
    assert why in capsys.readouterr().err


def test_a_folder_and_a_missing_file_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


def test_what_is_read_whole_has_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"{}" * 8)
    assert read_bytes(file, longest=16) == b"{}" * 8
    with pytest.raises(OSError, match="is longer than 15 bytes"):
        read_bytes(file, longest=15)
    os.truncate(file, 20 << 30)
    with pytest.raises(UserError, match="is longer than 16,777,216 bytes"):
        read_object(file, "")
    assert read_bytes("/proc/self/status").startswith(b"Name:")  # files of the kernel have no size
    with pytest.raises(OSError, match="is longer than 4 bytes"):
        read_bytes("/proc/self/status", longest=4)


def test_text_is_read_as_python_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("a\r\nb\rc\nß".encode())
    assert read_text(file) == file.read_text(encoding="utf-8")
    file.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(file)
    assert read_text(file, errors="replace") == "\ufffd"


def test_a_file_outside_of_the_named_folder_is_not_opened(tmp_path: Path) -> None:
    folder, secret = tmp_path / "named", tmp_path / "secret"
    (folder / "below").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "file").write_text("own")
    (folder / "link").symlink_to("file")
    (folder / "out").symlink_to(secret)
    (folder / "up").symlink_to("..")
    for name in ("file", "link", "below/../file"):
        assert read_text(folder / name, inside=folder) == "own"
    (tmp_path / "alias").symlink_to(folder)
    assert read_text(tmp_path / "alias" / "link", inside=tmp_path / "alias") == "own"
    for name in ("out", "../secret", "up/secret"):
        with pytest.raises(PermissionError, match="is a link to a file outside of"):
            open_file(folder / name, inside=folder)
        assert read_text(folder / name) == "secret"


def test_a_snapshot_of_the_hubs_cache_contains_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "f00", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("own")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert read_text(snapshot / "config.json", inside=snapshot) == "own"
    below = snapshot / "onnx" / "tokenizer"
    below.mkdir(parents=True)
    (below / "tokenizer.json").symlink_to("../../../../blobs/1")
    assert read_text(below / "tokenizer.json", inside=below) == "own"
    (below / "config.json").symlink_to("../../config.json")  # of the snapshot, which is not the folder that was named
    (snapshot / "large.json").write_text("beside")
    (below / "large.json").symlink_to("../../large.json")
    assert read_text(below / "config.json", inside=below) == "own"
    with pytest.raises(PermissionError, match="outside"):
        open_file(below / "large.json", inside=below)
    (tmp_path / "secret").write_text("secret")
    (blobs / "2").symlink_to(tmp_path / "secret")
    (snapshot / "vocab.json").symlink_to("../../blobs/2")
    with pytest.raises(PermissionError, match="outside"):
        open_file(snapshot / "vocab.json", inside=snapshot)
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path)
    for folder in (snapshot, below):
        (folder / "merges.txt").symlink_to(blobs / "secret")
        with pytest.raises(PermissionError, match="outside"):
            open_file(folder / "merges.txt", inside=folder)


def test_a_pattern_ends_where_links_lead_back(tmp_path: Path) -> None:
    loop, other = tmp_path / "loop", tmp_path / "other"
    (loop / "below").mkdir(parents=True)
    other.mkdir()
    for file in (loop / "a.jsonl", loop / "below" / "b.jsonl", loop / "below" / "c.txt", other / "d.jsonl"):
        file.touch()
    for name, target in (("here", "."), ("up", ".."), ("there", "../other")):
        (loop / name).symlink_to(target)
        (loop / "below" / name).symlink_to(target)
    found = matching(loop / "**" / "*.jsonl")
    assert {file.resolve() for file in found} == {loop / "a.jsonl", loop / "below" / "b.jsonl", other / "d.jsonl"}
    assert loop / "a.jsonl" in found and loop / "below" / "b.jsonl" in found and len(found) == 3


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "a/**/*.jsonl", "**", "**/b/*", "*/**/c/**/*.txt", "*.jsonl", "a/**"])
def test_a_pattern_finds_what_glob_finds(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.jsonl", "a/x.jsonl", "a/b/y.jsonl", "a/b/c/d/z.txt", "a/.hidden/x.jsonl", "b/b/y.jsonl", "[b]/y.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    expected = {Path(file) for file in glob.glob(pattern, recursive=True) if Path(file).is_file()}
    found = matching(Path(pattern))
    assert set(found) == expected and len(found) == len(expected)


def _crashes(folder: Path) -> list[str]:
    notes: list[str] = []
    assert list(_read_crashes(folder, notes)) == []
    return notes


def _log_with_events(run: Path) -> RunLog:
    (run / EVENTS).touch()
    return RunLog.read(run)


READERS_OF_FOLDERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "report: config": (CONFIG, RunLog.read_config),
    "report: metrics": (METRICS, lambda run: list(RunLog.read_metrics(run))),
    "report: events": (EVENTS, RunLog.read_events),
    "report: plugins": (PLUGINS, _log_with_events),
    "watch: metrics": (METRICS, lambda run: Tail(run / METRICS).read()),
    "watch: config": (CONFIG, lambda run: FollowedRun(run).poll()),
    "analyse: dumps": (RANK_FILE.format(0), lambda folder: Report.read(str(folder))),
    "analyse: stacks": (STACKS_FILE.format(0), lambda folder: Report.read(str(folder))),
    "analyse: crashes": ("rank-0.json", _crashes),
    "profile: trace": ("rank-0.json", lambda folder: TraceEvents.read(folder / "rank-0.json")),
    "resume: recipe": (CONFIG, lambda folder: read_raw(str(folder / CONFIG), Components(Discovery((), ())))),
    "checkpoint: manifest": (NAME, lambda folder: read_manifest(Folder(str(folder)))),
    "checkpoint: DCP": (".metadata", read_metadata),
    "weights: safetensors": ("model.safetensors", SafetensorsFiles),
    "weights: index": ("model.safetensors.index.json", lambda folder: weight_map(folder / "model.safetensors.index.json")),
    "weights: Meta": ("consolidated.00.pth", MetaFiles),
    "tokenizer: template": ("chat_template.jinja", lambda folder: ChatTemplate.read(folder, {})),
    "tokenizer: template in config": ("tokenizer_config.json", lambda folder: ChatTemplate.read(folder, {})),
    "tokenizer: config": ("tokenizer_config.json", lambda folder: TokenizerFolder(Tokenizer(BPE()), folder)),
    "tokenizer: special tokens": ("special_tokens_map.json", lambda folder: TokenizerFolder(Tokenizer(BPE()), folder)),
    "tokenizer: added tokens": ("added_tokens.json", lambda folder: TokenizerFolder(Tokenizer(BPE()), folder)),
    "tokenised: index": ("tokenized.json", read_index),
}


LEFT_OUT = ("watch: config",)
"""The command continues without the file."""


@pytest.mark.parametrize("name", READERS_OF_FOLDERS)
@pytest.mark.parametrize("make", [pipe, device])
def test_every_reader_refuses_them(name: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    file, read = READERS_OF_FOLDERS[name]
    make(tmp_path / file)
    try:
        found = read(tmp_path)
    except (UserError, BrokenCheckpoint) as error:
        found = error
    assert re.search("regular file|is a link", str(found)) or name in LEFT_OUT
