"""Downloads the tokenizer or the model of a repository on the Hugging Face hub.

``huggingface_hub`` downloads to ``FOLDER/.download``, where whole files of an interrupted download stay, and compares them
with the hub's hashes. Then they move to ``FOLDER``, which therefore contains only whole files, and ``config.json``, by which
a model is recognised, comes last. The environment variables of ``huggingface_hub`` apply: ``HF_ENDPOINT`` for a mirror,
``HF_HUB_OFFLINE``, and the proxy variables. The access token comes from ``HF_TOKEN`` only, never from a file.
"""

from __future__ import annotations

import filecmp
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from titan_core.api import UserError
from titan_core.api.config.secrets import REDACTED, redact_text
from titan_core.toolkit.reading import is_transient
from titan_core.toolkit.text import say, shorten, show_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKENIZER_JSON, TOKENIZER_MODEL, CONFIG = "tokenizer.json", "tokenizer.model", "config.json"
TOKENIZER_FILES: Final = (
    TOKENIZER_JSON, TOKENIZER_MODEL, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Names of the files of a tokenizer."""
MODEL_FILES: Final = (
    *TOKENIZER_FILES, "model*.safetensors", "model.safetensors.index.json", "generation_config.json", CONFIG, "LICENSE*",
    "USE_POLICY.md", "NOTICE",
)  # fmt: skip
"""Patterns of the names of files that make up a model. Other safetensors files are the same weights once more."""
_ORIGINAL: Final = f"original/{TOKENIZER_MODEL}"
"""Where Meta's repositories keep the ranks of Llama's tokenizer."""
_STAGING: Final = ".download"
_LEAST_BYTES, _WITHIN_SECONDS = 2**16, 60.0
"""A hub that sends fewer bytes in this time is given up. ``huggingface_hub`` waits as long as each byte comes in time."""


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    commit: str
    sizes: Mapping[str, int]
    """Bytes of each file, by path."""

    @property
    def where(self) -> str:
        """The repository and the commit, for messages."""
        return f"{self.name} at {self.commit[:7]}"

    def named(self, patterns: Collection[str]) -> list[str]:
        """Return the files beside ``config.json`` whose names match one of ``patterns``."""
        return [path for path in self.sizes if "/" not in path and any(fnmatch(path, one) for one in patterns)]


def find_repository(name: str, revision: str | None) -> Repository:
    """Look up the files of ``name`` at a branch, tag or commit (default: the main branch).

    Raises:
        UserError: the repository or the revision does not exist, access is denied, or the hub cannot be reached.
    """
    with _hub(name, revision) as api:
        found = api.model_info(name, revision=revision, files_metadata=True)
        return Repository(name, str(found.sha), {one.rfilename: int(one.size or 0) for one in found.siblings or ()})


def tokenizer_files(repository: Repository) -> list[str]:
    """Return the files of the repository's tokenizer.

    Raises:
        UserError: it has none in a format that Titan reads.
    """
    found = repository.named(TOKENIZER_FILES)
    if TOKENIZER_MODEL not in found and _ORIGINAL in repository.sizes:
        found.append(_ORIGINAL)
    if not {TOKENIZER_JSON, TOKENIZER_MODEL, _ORIGINAL}.intersection(found):
        has = f" (it has {', '.join(sorted(found))})" if found else ""
        why = f"has no tokenizer that Titan reads, neither {TOKENIZER_JSON} nor {TOKENIZER_MODEL}{has}"
        raise UserError.one(repository.where, why, "choose another repository, or convert the tokenizer with transformers")
    return found


def model_files(repository: Repository) -> list[str]:
    """Return the safetensors files of the repository's model, its configs and its tokenizer.

    Raises:
        UserError: it contains no model in safetensors.
    """
    require_config(repository)
    found = repository.named(MODEL_FILES)
    if not any(name.endswith(".safetensors") for name in found):
        why = "has no weights in model*.safetensors, and reading a pickle runs the code in it"
        raise UserError.one(repository.where, why, "choose a repository or a --revision with safetensors weights")
    return found


def require_config(repository: Repository) -> None:
    """
    Raises:
        UserError: the repository contains no description of a model.
    """
    if CONFIG not in repository.sizes:
        adapter = "adapter_config.json" in repository.sizes
        why = "contains an adapter (LoRA), not a whole model" if adapter else f"contains no {CONFIG}, so it is not a model"
        raise UserError.one(repository.where, why, "choose the repository of a model in the format of transformers")


def download(repository: Repository, folder: Path, files: Collection[str], belongs: Collection[str], force: bool) -> int:
    """Download those of ``files`` that ``folder`` lacks, verify them, and return their number.

    Args:
        belongs: patterns of file names that a consumer of the folder would read. A file in the folder that matches one of
            them and is not in the repository would be mixed up with the new files.
        force: replace files that differ, and remove those that would be mixed up.

    Raises:
        UserError: a file in the folder differs or would be mixed up, the hub cannot be reached, or what it sends does not
            match its own hash.
    """
    staging = folder / _STAGING
    with _hub(repository.name, repository.commit) as api:
        missing, damaged, extra = set(files), set[str](), set[str]()
        if folder.is_dir():
            found = api.verify_repo_checksums(repository.name, revision=repository.commit, local_dir=folder)
            damaged = {one["path"] for one in found.mismatches}.intersection(files)
            missing = damaged | set(files).intersection(found.missing_paths)
            names = {path.rpartition("/")[2] for path in files}
            extra = {path for path in found.extra_paths if path not in names and any(fnmatch(path, one) for one in belongs)}
        if damaged and not force:
            raise _differs(repository, folder / min(damaged))
        if extra and not force:
            why = f"contains {shorten(', '.join(sorted(extra)))}, which {repository.where} does not have"
            raise UserError.one(str(folder), why, "choose another folder with --output, or remove it with --force")
        if missing:
            size = show_bytes(sum(repository.sizes[path] for path in missing))
            say(f"downloading {', '.join(sorted(missing))} ({size})", file=sys.stderr, flush=True)
            api.snapshot_download(
                repository.name, revision=repository.commit, local_dir=staging, allow_patterns=sorted(missing)
            )
            found = api.verify_repo_checksums(repository.name, revision=repository.commit, local_dir=staging)
            if bad := sorted(one["path"] for one in found.mismatches):
                for path in bad:
                    (staging / path).unlink()
                why = f"{', '.join(bad)} does not match the hash that the hub reports for it, and was removed"
                fix = "run the same command again; if this repeats, the hub or the mirror (HF_ENDPOINT) serves damaged files"
                raise UserError.one(repository.where, why, fix)
        for path in extra:
            (folder / path).unlink()
        for path in sorted(missing, key=lambda path: path == CONFIG):
            target = folder / path.rpartition("/")[2]
            if target.exists() and not force and not filecmp.cmp(staging / path, target, shallow=False):
                raise _differs(repository, target)
            (staging / path).replace(target)
        shutil.rmtree(staging, ignore_errors=True)
    return len(missing)


def _differs(repository: Repository, path: Path) -> UserError:
    why = f"differs from the file in {repository.where}: it was changed, or belongs to another model or revision"
    return UserError.one(str(path), why, "choose another folder with --output, or replace it with --force")


def summary(repository: Repository, folder: Path, files: Collection[str]) -> dict[str, Any]:
    """Return what was downloaded, as JSON values."""
    listed = [{"name": path.rpartition("/")[2], "bytes": repository.sizes[path]} for path in files]
    return {"repository": repository.name, "commit": repository.commit, "folder": str(folder), "files": listed}


def described(repository: Repository, folder: Path, files: Collection[str], new: int) -> str:
    """Return what was downloaded, in one line; ``new`` is the result of :func:`download`."""
    size = show_bytes(sum(repository.sizes[path] for path in files))
    had = f"; {len(files) - new} were there already" if new < len(files) else ""
    return f"{folder}: {len(files)} files of {repository.where}, {size}{had}; hashes verified"


@contextmanager
def _hub(name: str, revision: str | None) -> Iterator[HfApi]:
    """Give access to the hub with the token of the environment, and convert errors to a ``UserError`` without it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    answers: _Answers | None = None
    if not re.fullmatch("[!-~]*", token):
        why = "is not an access token: it contains a blank or a character outside ASCII (its value is not shown)"
        raise UserError.one("HF_TOKEN", why, "copy the token again")
    try:
        from huggingface_hub import HfApi, get_session
        from huggingface_hub.utils.tqdm import disable_progress_bars

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings contain signed URLs
        if not sys.stderr.isatty():
            disable_progress_bars()
        with _Answers(get_session()) as answers:
            yield HfApi(token=token or False)
    except UserError:
        raise
    except Exception as error:
        if answers is not None and answers.too_slow:
            why = f"sends less than {show_bytes(_LEAST_BYTES)} in {_WITHIN_SECONDS:g} s"
            raise UserError.one(name, f"cannot be downloaded: the hub {why}", _AGAIN) from None
        # The exception classes of the HTTP client differ between versions of huggingface_hub.
        if not (is_transient(error) or isinstance(error, OSError | ValueError | KeyError | TypeError | AssertionError)):
            raise
        text = redact_text(" ".join(str(error).split()))
        why, fix = _explained(error, text.replace(token, REDACTED) if token else text, revision)
        raise UserError.one(name, why, fix) from None


_AGAIN = "check the network, proxy, disk and HF_ENDPOINT, and run the same command again: it keeps the files that are whole"


class _Answers:
    """Ends answers of the hub that are too slow, within the ``with`` block.

    Args:
        session: the HTTP client of ``huggingface_hub``, which reads answers in threads of its own.
    """

    def __init__(self, session: Any) -> None:
        self.too_slow = False
        self._session, self._over = session, threading.Event()
        self._before = session.event_hooks, session.timeout
        self._open: dict[Any, tuple[float, int]] = {}  # answer -> when its last interval began, and the bytes until then
        self._thread = threading.Thread(target=self._watch, name="speed of the hub", daemon=True)

    def __enter__(self) -> _Answers:
        hooks, _ = self._before
        self._session.event_hooks = {**hooks, "response": [*hooks["response"], self._begun]}
        self._session.timeout = _WITHIN_SECONDS  # for an answer to begin
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._session.event_hooks, self._session.timeout = self._before
        self._over.set()
        self._thread.join()

    def _begun(self, answer: Any) -> None:
        self._open[answer] = time.monotonic(), 0

    def _watch(self) -> None:
        while not self._over.wait(_WITHIN_SECONDS / 60):
            now = time.monotonic()
            for answer, (since, size) in list(self._open.items()):
                if answer.is_closed:
                    del self._open[answer]
                elif now - since >= _WITHIN_SECONDS:
                    self._open[answer] = now, answer.num_bytes_downloaded
                    if answer.num_bytes_downloaded - size < _LEAST_BYTES:
                        self.too_slow = True
                        answer.extensions["network_stream"].close()  # the thread that reads it gets an error


def _explained(error: Exception, text: str, revision: str | None) -> tuple[str, str]:
    """Return what ``error`` means, and what to do."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return f"is not the name of a repository: {text}", "write it as OWNER/NAME; a local folder needs no download"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "cannot be downloaded: HF_HUB_OFFLINE is set",
            "unset it, or copy the folder from a machine with network access",
        )
    if isinstance(error, errors.GatedRepoError):
        return "is gated", "request access on its page, and set HF_TOKEN to a token of that account"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {revision!r}", "choose a branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return "does not exist, or HF_TOKEN has no access to it", "check the name, and set HF_TOKEN to a valid token"
    return f"cannot be downloaded: {text or type(error).__name__}", _AGAIN
