"""Models of the Hugging Face hub: those that were downloaded to this machine, and what describes the others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from shlex import quote

from titan_core.api import UserError

DOWNLOADS = "assets/models"
"""Where `titan model download` writes a model, under its name."""


def locate(name: str) -> str:
    """Return the folder of the model ``name``: below :data:`DOWNLOADS`, or in the cache of ``huggingface_hub``. Nothing is
    downloaded: a job's ranks would do so at the same time.

    Raises:
        UserError: neither contains the model.
    """
    folder = Path(DOWNLOADS, name)
    if (folder / "config.json").is_file():  # the last file of a download
        return str(folder)

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise UserError.one(name, f"is not the name of a model: {error}", "check it") from None
    except (LocalEntryNotFoundError, OSError):
        why = f"is not a path, and there is no such model in {DOWNLOADS} or in the Hugging Face cache"
        raise UserError.one(name, why, f"check it, or run `titan model download {quote(name)}`") from None


def describe(name: str, folder: str) -> str:
    """Return the folder of the model ``name`` if this machine has it. Otherwise, download its ``config.json`` to ``folder``,
    and return that.

    Raises:
        UserError: there is no such model, or the hub cannot be reached.
    """
    from titan_data.hub import CONFIG, download, find_repository, require_config

    with suppress(UserError):  # the hub's own error says more
        local = locate(name)
        if Path(local, CONFIG).is_file():
            return local
    repository = find_repository(name, None)
    require_config(repository)
    download(repository, Path(folder), [CONFIG], (), force=False)
    return folder
