"""Models of the Hugging Face hub that were downloaded to this machine."""

from __future__ import annotations

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
