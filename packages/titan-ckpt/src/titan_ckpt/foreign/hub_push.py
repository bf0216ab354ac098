"""Pushing a folder of Hugging Face's format to a repository on the hub, through ``huggingface_hub``.

The environment variables of ``huggingface_hub`` apply: ``HF_ENDPOINT`` for another hub, ``HF_HUB_OFFLINE``, and the proxy
variables. The access token comes from ``HF_TOKEN`` only, never from a file.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from titan_core.api import UserError
from titan_core.api.config.secrets import REDACTED, redact_text
from titan_core.toolkit.reading import is_transient
from titan_core.toolkit.text import say, show_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_STALLED_SECONDS = 300.0
"""How long a push waits for bytes of the hub, or until it takes some. ``huggingface_hub`` itself waits for ever."""
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
"""Files of a repository that a loader would mix with those of the folder, if the folder has no file of the name."""

log = logging.getLogger(__name__)


class HubRepository:
    """A repository of models on the hub."""

    def __init__(self, name: str, where: str) -> None:
        """Check what can be checked without a network.

        Args:
            name: ``owner/name``.
            where: the key or option that names it, for errors.

        Raises:
            UserError: ``huggingface_hub`` is missing, the hub is not to be used (``HF_HUB_OFFLINE``), or there is no token.
        """
        self.name, self._where = name, f"{where} = {name!r}"
        if find_spec("huggingface_hub") is None:
            why = "needs the package huggingface-hub, which is not installed"
            raise UserError.one(self._where, why, "install it: `uv pip install 'huggingface-hub>=1.20'`")
        from huggingface_hub import is_offline_mode

        if is_offline_mode():
            raise UserError.one(self._where, "needs the hub, but HF_HUB_OFFLINE is set", "unset one of them")
        self._token = os.environ.get("HF_TOKEN", "").strip()
        if not self._token:
            raise UserError.one(self._where, "needs an access token, and HF_TOKEN is not set", self._fix_of_token)
        if not re.fullmatch("[!-~]+", self._token):
            why = "is not an access token: it contains a blank or a character outside ASCII (its value is not shown)"
            raise UserError.one("HF_TOKEN", why, "copy the token again")

    @property
    def _fix_of_token(self) -> str:
        return f"set HF_TOKEN to a token that may write to {self.name}"

    def require_access(self) -> None:
        """Make the repository, private, unless it exists, and require that the token may write to it. A hub that cannot be
        reached is one warning: it may be back before the first push.

        Raises:
            UserError: the token is not valid or may not.
        """
        try:
            with self._hub() as api:
                api.whoami()
                self._make(api)
                api.auth_check(self.name, write=True)
        except Exception as error:
            if not _is_expected(error):
                raise
            if not _may_pass(error):
                fix = self._fix_of_token if _status(error) else "check the name, and HF_ENDPOINT"
                raise UserError.one(self._where, self._shown(error), fix) from None
            log.warning("%s: the hub cannot be checked now; training begins: %s", self._where, self._shown(error))

    def push(self, folder: Path, message: str) -> str:
        """Make the repository, private, unless it exists, and push the files of ``folder`` as one commit, so that the
        repository never has weights of two folders. Return the address of the commit.

        Raises:
            UserError: the hub refuses it, or cannot be reached. The folder is as it was.
        """
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # retries; its warnings contain signed URLs
        try:
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete
            from huggingface_hub.utils.tqdm import disable_progress_bars

            if not sys.stderr.isatty():
                disable_progress_bars()
            with self._hub() as api:
                self._make(api)
                files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
                size = sum(path.stat().st_size for path in files.values())
                say(f"pushing to {self.name}: {', '.join(files)} ({show_bytes(size)})", flush=True)
                stale = (
                    path
                    for path in api.list_repo_files(self.name)
                    if path not in files and any(fnmatch(path, pattern) for pattern in _WEIGHTS)
                )
                # Not upload_folder, which may divide a long upload into several commits.
                operations: list[CommitOperationAdd | CommitOperationDelete] = [
                    *(CommitOperationAdd(name, path) for name, path in files.items()),
                    *(CommitOperationDelete(path) for path in stale),
                ]
                return str(api.create_commit(self.name, operations, commit_message=message).commit_url)
        except Exception as error:
            if not _is_expected(error):
                raise
            fix = f"push it later: `hf upload {quote(self.name)} {quote(str(folder))} .`"
            raise UserError.one(str(folder), f"is not pushed to {self.name}: {self._shown(error)}", fix) from None

    def _make(self, api: HfApi) -> None:
        api.create_repo(self.name, private=True, exist_ok=True)

    @contextmanager
    def _hub(self) -> Iterator[HfApi]:
        """Give access to the hub, with a limit of the time for which nothing happens."""
        from huggingface_hub import HfApi, get_session

        session = get_session()
        before, session.timeout = session.timeout, _STALLED_SECONDS
        try:
            yield HfApi(token=self._token)
        finally:
            session.timeout = before

    def _shown(self, error: BaseException) -> str:
        """Return the causes of ``error`` in one line, without the token."""
        texts: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            # The first line: an answer of the hub follows in others.
            text = str(cause).strip().partition("\n")[0] or type(cause).__name__
            texts += [text] if not any(text in other for other in texts) else []
            cause = cause.__cause__
        return redact_text(" ".join(": ".join(texts).split()).replace(self._token, REDACTED))


def _files(folder: Path) -> list[Path]:
    """Return the files below ``folder``.

    Raises:
        OSError: one is a link, and so may be a file elsewhere.
    """
    found = sorted(folder.rglob("*"))
    for path in found:
        if path.is_symlink():
            raise OSError(errno.EPERM, f"{path.relative_to(folder)} is a link, and what it leads to is not published")
    return [path for path in found if path.is_file()]


def _is_expected(error: Exception) -> bool:
    """Whether a hub or its network may cause ``error``, of which the classes differ between versions of the client.
    RuntimeError is that of a file that cannot be uploaded."""
    return is_transient(error) or isinstance(error, OSError | ValueError | KeyError | TypeError | RuntimeError)


def _may_pass(error: Exception) -> bool:
    """Whether ``error`` is one of the network, or of a hub that is out of order, rather than its answer to the token."""
    status = _status(error)
    return is_transient(error) and (status is None or status >= 500 or status in (408, 429))


def _status(error: Exception) -> int | None:
    """Return the status of the hub's answer, if it is one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
