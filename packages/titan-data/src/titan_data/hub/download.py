"""Downloads chosen files of a repository to a folder.

A file is downloaded to ``FOLDER/.download``, where an interrupted download resumes, and moves to ``FOLDER`` once its hash
is verified. ``FOLDER`` therefore contains only whole files, and ``config.json``, by which a model is recognised, comes last.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from titan_core.api import Problem, UserError
from titan_core.toolkit.text import shorten, show_bytes
from titan_data.hub.errors import hub_errors, without_token
from titan_data.hub.repository import HubFile, Repository, access_token

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STAGING = ".download"
_LAST = "config.json"
_RETRY = "run the same command again; if this repeats, the hub or the mirror (HF_ENDPOINT) serves damaged files"


@dataclass(frozen=True)
class Download:
    """Files of a repository and the folder for them."""

    repository: Repository
    folder: Path
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        """Total bytes."""
        return sum(file.size for file in self.files)

    @property
    def unverified(self) -> list[str]:
        """Names of the files whose hash the hub does not report. Of these, only the size is checked."""
        return [file.name for file in self.files if not file.identity]

    def summary(self) -> dict[str, Any]:
        """Return what was downloaded, as JSON values."""
        return {
            "repository": self.repository.name,
            "commit": self.repository.commit,
            "folder": str(self.folder),
            "files": [{"name": one.name, "bytes": one.size, "verified": bool(one.identity)} for one in self.files],
        }

    def run(self, belongs: Iterable[str], force: bool) -> int:
        """Download the files that are missing, verify them, and return their number.

        Args:
            belongs: patterns of file names that a consumer of the folder would read. A file in the folder that matches one
                of them and is not in the repository would be mixed up with the new files.
            force: replace files that differ, and remove those that would be mixed up.

        Raises:
            UserError: a file in the folder differs or would be mixed up, the disk is too small, the hub cannot be reached,
                or what it sends does not match its own hash.
        """
        with hub_errors(self.repository.name, access_token()):
            present = [file for file in self.files if (self.folder / file.name).exists()]
            if present:
                size = show_bytes(sum(file.size for file in present))
                print(f"comparing {size} that are already in {self.folder} with the hub's hashes", file=sys.stderr)
            missing = [file for file in self.files if not self._is_there(file, force)]
            mixed = self._mixed_up(belongs, force)
            self._require_space(missing)
            for path in mixed:
                path.unlink()
            with _bar(missing) as bar:
                for number, file in enumerate(sorted(missing, key=lambda file: file.name == _LAST), 1):
                    bar.begin(file, number, len(missing))
                    source = self.fetch(file, bar)
                    source.replace(self.folder / file.name)
            shutil.rmtree(self.folder / STAGING, ignore_errors=True)
        return len(missing)

    def fetch(self, file: HubFile, bar: _Bar | None = None) -> Path:
        """Download ``file`` and verify it. Returns where it is, which is not yet its final place.

        Raises:
            UserError: see :meth:`run`.
        """
        token = access_token()
        staging = self.folder / STAGING
        whole = staging / file.name
        # A name of its own for other contents: a partial file of another revision must not be continued.
        partial = staging / f"{file.name}.{file.identity[:16] or file.size}.partial"
        with hub_errors(self.repository.name, token):
            from huggingface_hub import constants, hf_hub_url
            from huggingface_hub.file_download import http_get

            _keep_token_out_of_logs(token)
            if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
                limit = show_bytes(constants.MAX_HTTP_DOWNLOAD_SIZE)
                why = f"{file.path} is larger than {limit}, the most that the hub sends over HTTP"
                raise UserError.one(self.repository.where, why, f"run `hf download {self.repository.name}` instead")
            staging.mkdir(parents=True, exist_ok=True)
            if whole.is_file() and file.is_at(whole):
                return whole
            resume = partial.stat().st_size if partial.exists() else 0
            if resume > file.size:
                partial.unlink()
                resume = 0
            headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {})
            url = hf_hub_url(self.repository.name, file.path, revision=self.repository.commit)
            with partial.open("ab") as target:
                # The HTTP client drops the token when the hub redirects to a host that stores large files.
                http_get(
                    url,
                    target,
                    resume_size=resume,
                    headers=headers,
                    expected_size=file.size,
                    displayed_filename=file.name,
                    tqdm_class=_reporting_to(bar),
                )
            if not file.is_at(partial):
                partial.unlink()
                why = f"{file.path} does not match the hash that the hub reports for it, and was removed"
                raise UserError.one(self.repository.where, why, _RETRY)
            partial.replace(whole)
        return whole

    def _is_there(self, file: HubFile, force: bool) -> bool:
        """Whether the folder has ``file``.

        Raises:
            UserError: the folder has another file of this name, and ``force`` is not set.
        """
        path = self.folder / file.name
        if not path.exists():
            return False
        if path.is_file() and file.is_at(path):
            return True
        if force and path.is_file():
            return False
        why = f"differs from the file in {self.repository.where}: it was changed, or belongs to another model or revision"
        raise UserError.one(str(path), why, "choose another folder with --output, or replace it with --force")

    def _mixed_up(self, belongs: Iterable[str], force: bool) -> list[Path]:
        """Return the files that would be mixed up with the new ones.

        Raises:
            UserError: there are such files, and ``force`` is not set.
        """
        names = {file.name for file in self.files}
        mixed = sorted({path for pattern in belongs for path in self.folder.glob(pattern) if path.name not in names})
        if mixed and not force:
            why = f"contains {shorten(', '.join(path.name for path in mixed))}, which {self.repository.where} does not have"
            raise UserError.one(str(self.folder), why, "choose another folder with --output, or remove it with --force")
        return mixed

    def _require_space(self, missing: Sequence[HubFile]) -> None:
        existing = next(path for path in (self.folder, *self.folder.resolve().parents) if path.is_dir())
        present = sum(path.stat().st_size for path in (self.folder / STAGING).glob("*") if path.is_file())
        needed, free = sum(file.size for file in missing) - present, shutil.disk_usage(existing).free
        if needed > free:
            why = f"needs {show_bytes(needed)}, but its disk has only {show_bytes(free)} free"
            raise UserError(Problem(str(self.folder), why, "free some space, or choose another disk with --output"))


def described(download: Download, new: int) -> str:
    """Return what ``download`` has done, in one or two lines; ``new`` is the result of :meth:`Download.run`."""
    count = len(download.files)
    what = f"{count} file{'s' if count != 1 else ''} of {download.repository.where}, {show_bytes(download.size)}"
    had = "all were there already" if new == 0 else f"{count - new} were there already" if new < count else ""
    checked = "hashes verified" if not download.unverified else ""
    lines = [f"{download.folder}: {'; '.join(filter(None, (what, had, checked)))}"]
    if download.unverified:
        names = shorten(", ".join(download.unverified))
        lines.append(f"the hub reports no hash for {names}: only sizes were checked")
    return "\n".join(lines)


class _Bar:
    """Progress over all files on stderr: a bar on a terminal, otherwise a line per file."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def begin(self, file: HubFile, number: int, count: int) -> None:
        """Show that ``file`` is being downloaded."""
        self._progress.update(self._task, description=f"{number}/{count} {file.name}")
        if not self._progress.console.is_terminal:
            print(f"{number}/{count} {file.name} ({show_bytes(file.size)})", file=sys.stderr, flush=True)

    def advance(self, size: float) -> None:
        """Count ``size`` bytes."""
        self._progress.advance(self._task, size)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()


def _bar(files: Sequence[HubFile]) -> _Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    return _Bar(progress, progress.add_task("", total=sum(file.size for file in files)))


def _reporting_to(bar: _Bar | None) -> Any:
    """Return a class with the part of ``tqdm``'s interface that ``huggingface_hub`` uses, which reports to ``bar``."""

    class Reporter:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.update(initial)

        def update(self, size: float | None = 1) -> None:
            if bar is not None:
                bar.advance(size or 0)

        def __enter__(self) -> Reporter:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    return Reporter


class _WithoutToken(logging.Filter):
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._token = token

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove secrets from the message, such as those of a signed URL."""
        record.msg, record.args = without_token(record.getMessage(), self._token), ()
        return True


def _keep_token_out_of_logs(token: str | None) -> None:
    for handler in logging.getLogger("huggingface_hub").handlers:
        if not any(isinstance(one, _WithoutToken) for one in handler.filters):
            handler.addFilter(_WithoutToken(token))
