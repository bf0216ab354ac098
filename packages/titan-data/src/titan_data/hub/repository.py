"""A model repository on the Hugging Face hub: its files, their sizes and their hashes.

``huggingface_hub`` talks to the hub, so its environment variables apply: ``HF_ENDPOINT`` for a mirror, ``HF_HUB_OFFLINE``,
and the proxy variables of its HTTP client. The access token comes from ``HF_TOKEN`` only, never from a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from titan_core.api import UserError
from titan_data.hub.errors import hub_errors

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_BLOCK = 4 << 20


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    path: str
    size: int
    """Bytes."""
    sha256: str | None
    """SHA-256 of a file in LFS or Xet storage, which the hub keeps outside git."""
    blob: str | None
    """Git's object id of any other file: the SHA-1 of a header and the contents."""

    @property
    def name(self) -> str:
        """The file's name without its folder, under which it is stored."""
        return self.path.rpartition("/")[2]

    @property
    def identity(self) -> str:
        """The hash of the contents, or an empty string if the hub reports none."""
        return self.sha256 or self.blob or ""

    def is_at(self, path: Path) -> bool:
        """Whether the file at ``path`` has these contents. If the hub reports no hash, only the size is compared."""
        if path.stat().st_size != self.size:
            return False
        if not self.identity:
            return True
        with path.open("rb") as file:
            return _hash(file, self.size, sha256=self.sha256 is not None) == self.identity


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: str
    commit: str
    files: Mapping[str, HubFile]
    """By path."""

    @property
    def where(self) -> str:
        """The repository and the commit, for messages."""
        return f"{self.name} at {self.commit[:7]}"


def find_repository(name: str, revision: str | None) -> Repository:
    """Look up the files of ``name`` at a branch, tag or commit (default: the main branch).

    Raises:
        UserError: the repository or the revision does not exist, access is denied, or the hub cannot be reached.
    """
    token = access_token()
    with hub_errors(name, token, revision, parses=True):
        from huggingface_hub import HfApi, constants

        api, timeout = HfApi(token=token or False), constants.HF_HUB_DOWNLOAD_TIMEOUT
        found = api.model_info(name, revision=revision, files_metadata=True, timeout=timeout)
        files = []
        for one in found.siblings or ():
            if one.size is None:
                raise ValueError(f"it reports no size for {one.rfilename}")
            files.append(HubFile(one.rfilename, one.size, one.lfs.sha256 if one.lfs is not None else None, one.blob_id))
        if not found.sha:
            raise ValueError("it reports no commit")
        return Repository(name, found.sha, {file.path: file for file in files})


def access_token() -> str | None:
    """Return the access token in the environment, if there is one.

    Raises:
        UserError: it cannot be sent in an HTTP header.
    """
    for variable in TOKEN_VARIABLES:
        token = os.environ.get(variable, "").strip()
        if token and not re.fullmatch("[!-~]+", token):
            why = "is not an access token: it contains a blank or a character outside ASCII (its value is not shown)"
            raise UserError.one(variable, why, "copy the token again")
        if token:
            return token
    return None


def _hash(file: BinaryIO, size: int, sha256: bool) -> str:
    digest = hashlib.sha256() if sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
