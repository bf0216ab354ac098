"""The run directory: resolved config, plugin versions, metrics, events and debug output."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from titan_core.api.errors import UserError
from titan_core.api.job import Job
from titan_core.api.launcher import LOCKED, lock_for_ranks
from titan_core.api.run_folder import PREVIOUS, run_folders
from titan_core.api.runs.files import CONFIG, DEBUG, EVENTS, LOGS, METRICS, PLUGINS
from titan_core.api.runs.folder_lock import FolderLock
from titan_core.api.runs.json_lines import read_lines
from titan_core.config.render import to_toml
from titan_core.runlog.other_runs import require_own_run, warn_of_other_recipe

log = logging.getLogger(__name__)

OWN = (CONFIG, PLUGINS, METRICS, EVENTS, DEBUG, LOGS)
"""Files and folders of one run, from its fresh start to its end."""


@contextmanager
def run_lock(folder: str) -> Iterator[None]:
    """Lock a run directory against other jobs. A job holds one lock: that of Titan's launcher if it starts all ranks, else
    that of rank 0, taken before rank 0 waits for other ranks.

    Raises:
        UserError: another job uses the directory.
    """
    if os.environ.get("RANK", "0") != "0" or os.environ.get(LOCKED) == str(Path(folder).resolve()):
        yield
        return
    with FolderLock(Path(folder), f"job.dump_folder = {folder!r}"):
        yield


@contextmanager
def early_lock(folder: str) -> Iterator[None]:
    """Take :func:`run_lock` of an existing directory before torch is imported and data is opened, so that a second job fails
    at once. A directory that does not exist has no writer, and is not created: mistakes in the data should not leave it.

    Raises:
        UserError: another job uses the directory.
    """
    locked = os.environ.get(LOCKED) == str(Path(folder).resolve())
    if os.environ.get("RANK", "0") != "0" or locked or not Path(folder).is_dir():
        yield
        return
    with lock_for_ranks(folder):
        yield


@dataclass(frozen=True)
class RunDirectory:
    """``job.dump_folder``."""

    path: Path
    locks: ExitStack = field(default_factory=ExitStack, compare=False)
    """Locks of further folders that the run writes to. The owner closes them when the run ends."""

    def lock_folder(self, folder: Path, where: str) -> None:
        """Lock ``folder`` against other jobs until the run ends. Errors name it by ``where``.

        Raises:
            UserError: another job uses the folder.
        """
        self.locks.enter_context(FolderLock(folder, where))

    @classmethod
    def create(cls, folder: str) -> RunDirectory:
        """Create the directory.

        Raises:
            UserError: it cannot be created or written.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise UserError.one(
                f"job.dump_folder = {folder!r}", f"cannot be written: {error.strerror}", "choose another folder"
            ) from None
        return cls(path)

    def begin(self, job: Job, step: int) -> None:
        """Write the resolved config and the plugin versions, and set older files aside.

        A fresh start (``step`` 0) first moves an older run's files, and the output folders that the config names, to
        ``previous/N``. A resumed run continues the metrics, without the steps that an earlier attempt logged after ``step``;
        files that it changes are first copied to ``previous/N``. If the process is killed, each file is the old or the new
        one.

        Raises:
            UserError: a file cannot be written, an older run's metrics are damaged, or a fresh start would move a run of
                another recipe or model.
        """
        if step == 0:
            require_own_run(self.path, job)
        else:
            warn_of_other_recipe(self.path, job)
        documents = {
            CONFIG: to_toml(job.config),
            PLUGINS: json.dumps(job.plugin_versions(), indent=2) + "\n",
        }
        strange = next((name for name in (METRICS, EVENTS) if step > 0 and (self.path / name).is_dir()), None)
        if strange is not None:
            raise UserError.one(str(self.path / strange), "is a folder, but must be a file", "move it away")
        try:
            if step > 0 and (self.path / METRICS).exists():
                documents[METRICS] = _up_to(step, self.path / METRICS)
            if step == 0:
                names = dict.fromkeys([*OWN, *run_folders(job.config.sections.values())])
                archive = self._archive([name for name in names if (self.path / name).exists()], shutil.move)
                if archive is not None:
                    log.info("moved the files of the earlier run in %s to %s", self.path, archive)
            else:
                self._archive([name for name, text in documents.items() if self._differs(name, text)], shutil.copy2)
            for name, text in documents.items():
                part = self.path / f".{name}.part"
                part.write_text(text, encoding="utf-8")
                part.replace(self.path / name)
        except OSError as error:
            where = f"job.dump_folder = {str(self.path)!r}"
            why = f"{error.filename or 'a file in it'} cannot be read or written: {error.strerror or error}"
            raise UserError.one(where, why, "free space, fix the file, or choose another folder") from error

    def _archive(self, names: list[str], bring: Callable[[Path, Path], object]) -> Path | None:
        """Call ``bring`` with each file and its place in a new ``previous/N``. Return that folder, ``None`` if no file."""
        if not names:
            return None
        previous = self.path / PREVIOUS
        number = 1 + max((int(folder.name) for folder in previous.glob("[0-9]*") if folder.name.isdigit()), default=0)
        archive = previous / str(number)
        archive.mkdir(parents=True)
        for name in names:
            # It may have moved already, inside of another one.
            if (self.path / name).exists():
                (archive / name).parent.mkdir(parents=True, exist_ok=True)
                bring(self.path / name, archive / name)
        return archive

    def _differs(self, name: str, text: str) -> bool:
        file = self.path / name
        return file.exists() and file.read_bytes() != text.encode()


def _up_to(step: int, metrics: Path) -> str:
    """Return the complete lines of steps up to ``step``.

    Raises:
        UserError: a line is damaged.
    """
    records = read_lines(metrics)
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("step"), int):
            raise UserError.one(f"{metrics}:{number}", "has no step", "remove the line, or restore the file")
    return "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step)
