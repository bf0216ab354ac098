"""The run's directory: resolved config, plugin versions, metrics, events, and what debugging leaves."""

from __future__ import annotations

import json
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

OWN = (CONFIG, PLUGINS, METRICS, EVENTS, DEBUG, LOGS)
"""What belongs to one run, from a fresh start to its end."""


@contextmanager
def run_lock(folder: str) -> Iterator[None]:
    """Hold a run's directory against other jobs. A job has one lock: its launcher's where that is Titan's and starts all
    ranks, else rank 0's, which takes it before it waits for other ranks.

    Raises:
        UserError: another job writes there.
    """
    if os.environ.get("RANK", "0") != "0" or os.environ.get(LOCKED) == str(Path(folder).resolve()):
        yield
        return
    with FolderLock(Path(folder), f"job.dump_folder = {folder!r}"):
        yield


@contextmanager
def early_lock(folder: str) -> Iterator[None]:
    """:func:`run_lock` before torch is imported and the data is opened, of a directory that exists, so that a second job is
    refused at once. A directory that is not there has no writer, and mistakes in the data need not leave one behind.

    Raises:
        UserError: another job writes there.
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
    """Of further folders that the run writes to; to be closed at its end."""

    def hold(self, folder: Path, where: str) -> None:
        """Hold ``folder`` against other jobs until the run ends.

        Raises:
            UserError: another one writes there; ``where`` names the folder.
        """
        self.locks.enter_context(FolderLock(folder, where))

    @classmethod
    def create(cls, folder: str) -> RunDirectory:
        """Make the folder.

        Raises:
            UserError: it cannot be made.
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
        """Write what the run is.

        A fresh start (``step`` 0) first moves an older run's files, and the folders that the config names for such, to
        ``previous/N``. A resumed run continues in the same
        metrics, less what an earlier attempt logged after ``step``; whatever it changes is kept in ``previous/N`` too. A
        process that is killed meanwhile leaves each file as it was or as it is to be.

        Raises:
            UserError: something cannot be written, or an older run's metrics are damaged.
        """
        documents = {
            CONFIG: to_toml(job.config),
            PLUGINS: json.dumps(job.plugin_versions(), indent=2) + "\n",
        }
        strange = next((name for name in (METRICS, EVENTS) if step > 0 and (self.path / name).is_dir()), None)
        if strange is not None:
            raise UserError.one(str(self.path / strange), "is a folder, and should be a file", "move it away")
        try:
            if step > 0 and (self.path / METRICS).exists():
                documents[METRICS] = _up_to(step, self.path / METRICS)
            if step == 0:
                own = dict.fromkeys([*OWN, *run_folders(job.config.sections.values())])
                self._archive([name for name in own if (self.path / name).exists()], shutil.move)
            else:
                self._archive([name for name, text in documents.items() if self._differs(name, text)], shutil.copy2)
            for name, text in documents.items():
                part = self.path / f".{name}.part"
                part.write_text(text, encoding="utf-8")
                part.replace(self.path / name)
        except OSError as error:
            where = f"job.dump_folder = {str(self.path)!r}"
            why = f"{error.filename or 'a file of it'} cannot be read or written: {error.strerror or error}"
            raise UserError.one(where, why, "free space, fix the file, or choose another folder") from error

    def _archive(self, names: list[str], bring: Callable[[Path, Path], object]) -> None:
        if not names:
            return
        previous = self.path / PREVIOUS
        number = 1 + max((int(one.name) for one in previous.glob("[0-9]*") if one.name.isdigit()), default=0)
        archive = previous / str(number)
        archive.mkdir(parents=True)
        for name in names:
            # What lies within another one of them may have been moved with it.
            if (self.path / name).exists():
                (archive / name).parent.mkdir(parents=True, exist_ok=True)
                bring(self.path / name, archive / name)

    def _differs(self, name: str, text: str) -> bool:
        file = self.path / name
        return file.exists() and file.read_bytes() != text.encode()


def _up_to(step: int, metrics: Path) -> str:
    """The whole lines of steps up to ``step``.

    Raises:
        UserError: a line is damaged.
    """
    records = read_lines(metrics)
    for number, record in enumerate(records, 1):
        if not isinstance(record.get("step"), int):
            raise UserError.one(
                f"{metrics}:{number}", "this line is none of a run's: it has no step", "remove it, or restore the file"
            )
    return "".join(json.dumps(record) + "\n" for record in records if record["step"] <= step)
