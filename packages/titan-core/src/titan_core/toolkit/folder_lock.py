"""A lock that gives a folder a single writer. Free of torch.

``flock`` decides on one machine, and between machines if the file system supports it; the kernel releases it when the
process ends, for whatever reason. On network file systems without ``flock``, a heartbeat decides: the holder touches the
lock file every few seconds, and another process takes over a file that is no longer touched.

The server of a network file system keeps the locks of a machine that has lost power until it gives the machine up. A process
that finds such a lock waits for that.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_core.api import UserError
from titan_core.toolkit.own_files import no_link
from titan_core.toolkit.processes import is_alive, pid_namespace

log = logging.getLogger(__name__)

NAME = ".lock"
BEAT_SECONDS = 10.0
"""Interval at which the holder touches the file."""
STALE_SECONDS = 35.0
"""Age of the last touch after which a holder on another machine counts as gone."""
LEASE_SECONDS = 180.0
"""How long to wait for a server to give up a machine that no longer touches its file (NFSv4: 90 s, Lustre: about 100 s)."""
POLL_SECONDS = 1.0
"""Interval at which a waiting process checks whether the file is stale."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    pid_namespace: str | None
    machine: str
    """Identifies the machine until its next boot; the same in all of its containers."""
    started: float
    """Time at which the process took the lock, in seconds since the epoch."""

    @classmethod
    def this_process(cls) -> Holder:
        """Describe this process as a holder from now on."""
        return cls(socket.gethostname(), os.getpid(), pid_namespace(), _machine(), time.time())

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} on host {self.host} (since {since})"


class FolderLock:
    """A context manager that locks ``folder``, which it creates, against other processes and threads.

    It costs one file and one thread that touches it. A process that is killed leaves the file behind, but not the lock.
    """

    def __init__(self, folder: Path, where: str, restarted: bool = False) -> None:
        """
        Args:
            where: the setting that names the folder, for errors: ``"job.dump_folder = 'outputs/my'"``.
            restarted: whether this process continues a job whose last holder may have been lost a moment ago.
        """
        self._path, self._where, self._restarted = folder / NAME, where, restarted
        self._descriptor = -1
        self._released = threading.Event()

    @classmethod
    def beside(cls, folder: Path, where: str) -> FolderLock:
        """Return a lock for a folder that must be empty at first: the lock file is placed next to it."""
        lock = cls(folder.parent, where)
        lock._path = folder.with_name(f".{folder.name}{NAME}")
        return lock

    @property
    def was_left(self) -> bool:
        """Whether the file of the lock exists: somebody holds it, or was killed while holding it."""
        return os.path.lexists(self._path)

    def __enter__(self) -> FolderLock:
        """Take the lock.

        Raises:
            UserError: another process holds it, or the folder cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._take()
        except OSError as error:
            why = f"cannot be written: {error.strerror or error}"
            if error.errno == errno.ELOOP:
                why = f"{self._path} is a link, and a lock is not taken elsewhere"
            raise UserError.one(self._where, why, "choose another folder") from None
        self._released.clear()
        threading.Thread(target=self._beat, name="folder lock", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._released.set()
        descriptor, self._descriptor = self._descriptor, -1
        if self._is_at_path(descriptor):
            self._path.unlink(missing_ok=True)
        os.close(descriptor)

    def _take(self) -> int:
        while True:
            descriptor = no_link(self._path, os.O_RDWR | os.O_CREAT)
            try:
                locked = _flock(descriptor)
                if locked is False:
                    holder = _read(descriptor)
                    if holder is None or not self._await_release(descriptor, holder):
                        raise self._refusal(holder)
                elif self._is_at_path(descriptor):
                    holder = _read(descriptor)
                    if holder is not None:
                        self._require_gone(holder, locked)
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the holder has just removed the file, or its machine was given up: try again

    def _await_release(self, descriptor: int, holder: Holder) -> bool:
        """Wait for the lock of another machine that may be lost; return whether it was released."""
        age = self._now() - os.stat(self._path).st_mtime
        if holder.machine == _machine() or (age <= 1.5 * BEAT_SECONDS and not self._restarted):
            return False
        log.warning(
            "%s is locked by %s, which has not touched it for %.0f s; waiting up to %.0f s for its lock to be given up",
            self._path, holder, age, LEASE_SECONDS,
        )  # fmt: skip
        first, until = os.stat(self._path).st_mtime_ns, time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            os.close(no_link(self._path, os.O_RDONLY | os.O_CREAT))  # NFS refreshes cached attributes when a file is opened
            if os.stat(self._path).st_mtime_ns != first and self._is_at_path(descriptor):
                return False
            if _flock(descriptor):
                return True
        return False

    def _require_gone(self, holder: Holder, locked: bool | None) -> None:
        """Raise unless the holder named in the file is gone. On its own machine, a free ``flock`` proves that it is."""
        if holder.machine == _machine():
            same = holder.pid_namespace is not None and holder.pid_namespace == pid_namespace()
            if locked or (same and not is_alive(holder.pid)):
                return
        first = os.stat(self._path).st_mtime_ns
        logged = False
        while (age := self._now() - os.stat(self._path).st_mtime) <= STALE_SECONDS:
            if not logged:
                log.warning(
                    "%s was left by %s; waiting up to %.0f s to see whether it still runs", self._path, holder, STALE_SECONDS
                )
                logged = True
            time.sleep(min(POLL_SECONDS, max(0.0, STALE_SECONDS - age) + 0.01))
            os.close(os.open(self._path, os.O_RDONLY))  # NFS refreshes cached attributes when a file is opened
            if os.stat(self._path).st_mtime_ns != first:
                raise self._refusal(holder)

    def _now(self) -> float:
        """Return the time on the file system's clock, which also sets the file times of other machines."""
        probe = self._path.with_name(f"{NAME}.{socket.gethostname()}.{os.getpid()}")
        try:
            probe.touch()
            os.utime(probe)
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _refusal(self, holder: Holder | None) -> UserError:
        other = str(holder) if holder is not None else "another process"
        return UserError.one(
            self._where, f"{other} is writing there", "wait for it to end, end it, or choose another folder"
        )

    def _is_at_path(self, descriptor: int) -> bool:
        own = os.fstat(descriptor)
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)

    def _beat(self) -> None:
        descriptor, lost = self._descriptor, False
        while not self._released.wait(BEAT_SECONDS):
            # Temporary disk failures must not end the heartbeat.
            with contextlib.suppress(OSError):
                os.utime(descriptor)
                if not lost and not self._is_at_path(descriptor):
                    lost = True
                    log.error("%s was replaced: another job may be writing there too", self._path)


def _flock(descriptor: int) -> bool | None:
    """Whether the lock could be taken; ``None`` if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _read(descriptor: int) -> Holder | None:
    """Return the holder named in the file; ``None`` if it was never written completely."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return socket.gethostname()
