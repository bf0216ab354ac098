"""The run directory: resolved config, plugin versions, metrics, events and debug output."""

from __future__ import annotations

import filecmp
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from titan_core.api import UserError
from titan_core.api.config.run_folder import PREVIOUS, run_folders
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.config.render import to_toml
from titan_core.runlog.other_runs import require_own_run, warn_of_other_recipe
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.folder_lock import FolderLock
from titan_core.toolkit.json_lines import records_of
from titan_core.toolkit.launching import LOCKED, RANK_LOGS, RESTART, lock_for_ranks, rank_log
from titan_core.toolkit.own_files import require_inside
from titan_core.toolkit.runs.files import CONFIG, DEBUG, EVENTS, EXCLUDED, LOGS, METRICS, PLUGINS

log = logging.getLogger(__name__)

OWN = (CONFIG, PLUGINS, METRICS, EVENTS, DEBUG)
"""Files and folders of one run, from its fresh start to its end. There are logs too."""


def run_lock(folder: str) -> AbstractContextManager[object]:
    """Lock a run directory against other jobs. A job holds one lock: that of Titan's launcher if it starts all ranks, else
    that of rank 0, taken before rank 0 waits for other ranks. On entry, a directory that another job uses is a UserError."""
    if not _takes_lock(folder):
        return nullcontext()
    return FolderLock(Path(folder), f"job.dump_folder = {folder!r}", restarted=RESTART in os.environ)


def early_lock(folder: str) -> AbstractContextManager[object]:
    """Take :func:`run_lock` of an existing directory before torch is imported and data is opened, so that a second job fails
    at once. A directory that does not exist has no writer, and is not created: mistakes in the data should not leave it."""
    return lock_for_ranks(folder) if Path(folder).is_dir() and _takes_lock(folder) else nullcontext()


def _takes_lock(folder: str) -> bool:
    return os.environ.get("RANK", "0") == "0" and os.environ.get(LOCKED) != str(Path(folder).resolve())


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
        self.locks.enter_context(FolderLock(folder, where, restarted=RESTART in os.environ))

    @classmethod
    def create(cls, folder: str) -> RunDirectory:
        """Create the directory.

        Raises:
            UserError: it cannot be created or written.
        """
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):  # ranks try at the same time, each with a name of its own
                pass
        except OSError as error:
            raise UserError.one(
                f"job.dump_folder = {folder!r}", f"cannot be written: {error.strerror}", "choose another folder"
            ) from None
        return cls(path)

    def begin(self, job: AssembledJob, step: int) -> None:
        """Write the resolved config and the plugin versions, and set older files aside.

        A fresh start (``step`` 0) first moves an older run's files, and the output folders that the config names, to
        ``previous/N``. A resumed run continues the metrics, without the steps that an earlier attempt logged after ``step``;
        files that it changes are first copied to ``previous/N``. If the process is killed, each file is the old or the new
        one.

        Raises:
            UserError: a file cannot be written, an older run's metrics are damaged, a link leads out of the directory, or a
                fresh start would move a run of another recipe or model.
        """
        require_inside(self.path, (*OWN, LOGS, EXCLUDED, *run_folders(job.config.sections.values())))
        require_inside(self.path, [PREVIOUS], contents=False)
        if step == 0:
            require_own_run(self.path, job)
        else:
            warn_of_other_recipe(self.path, job)
        documents: dict[str, Iterable[str]] = {
            CONFIG: [to_toml(job.run_config)],
            PLUGINS: [json.dumps(job.plugin_versions(), indent=2) + "\n"],
        }
        strange = next((name for name in (METRICS, EVENTS) if step > 0 and (self.path / name).is_dir()), None)
        if strange is not None:
            raise UserError.one(str(self.path / strange), "is a folder, but must be a file", "move it away")
        try:
            if step > 0 and (self.path / METRICS).exists():
                documents[METRICS] = _up_to(step, self.path / METRICS)  # may be larger than memory
            with ExitStack() as written:
                parts = {name: written.enter_context(atomic_write(self.path / name)) for name in documents}
                for name, part in parts.items():
                    with part.open("w", encoding="utf-8") as file:
                        file.writelines(documents[name])
                if step == 0:
                    names = dict.fromkeys([*OWN, *self._older_logs(job), *run_folders(job.config.sections.values())])
                    archive = self._archive([name for name in names if (self.path / name).exists()], shutil.move)
                    if archive is not None:
                        log.info("moved the files of the earlier run in %s to %s", self.path, archive)
                else:
                    self._archive([name for name, part in parts.items() if self._differs(name, part)], shutil.copy2)
        except OSError as error:
            where = f"job.dump_folder = {str(self.path)!r}"
            why = f"{error.filename or 'a file in it'} cannot be read or written: {error.strerror or error}"
            raise UserError.one(where, why, "free space, fix the file, or choose another folder") from error

    def _older_logs(self, job: AssembledJob) -> list[str]:
        """Return the logs that an older run left. The launcher already writes those of this run."""
        logs, current = self.path / LOGS, set[Path]()
        if RANK_LOGS in os.environ:
            current = {rank_log(self.path, rank).resolve() for rank in range(job.mesh.world_size)}
            attempts = sorted(int(path.name[8:]) for path in logs.glob("attempt-*") if path.name[8:].isdigit())
            restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            current.update((logs / f"attempt-{number}").resolve() for number in attempts[len(attempts) - restarts :])
        found = logs.iterdir() if logs.is_dir() else [logs]
        return [str(path.relative_to(self.path)) for path in sorted(found) if path.resolve() not in current]

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

    def _differs(self, name: str, part: Path) -> bool:
        file = self.path / name
        return file.exists() and not filecmp.cmp(file, part, shallow=False)


def _up_to(step: int, metrics: Path) -> Iterator[str]:
    """Yield the complete lines of steps up to ``step``.

    Raises:
        UserError: a line is damaged.
    """
    for number, record in records_of(metrics):
        if not isinstance(record.get("step"), int):
            raise UserError.one(f"{metrics}:{number}", "has no step", "remove the line, or restore the file")
        if record["step"] <= step:
            yield json.dumps(record) + "\n"
