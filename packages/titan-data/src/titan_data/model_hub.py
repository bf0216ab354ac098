"""Models of the Hugging Face hub that are in this machine's cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from titan_core.api.errors import UserError


def locate(name: str) -> str:
    """Return the folder of the cache that contains the model ``name``. Nothing is downloaded: a job's ranks would do so at
    the same time.

    Raises:
        UserError: the cache does not contain the model.
    """
    try:
        folder = snapshot_download(name, local_files_only=True)
    except HFValidationError as error:
        raise UserError.one(name, f"is not the name of a model: {error}", "check it") from None
    except (LocalEntryNotFoundError, OSError):
        why = "is neither a path nor a model in the Hugging Face cache"
        raise UserError.one(
            name, why, f"check it, or run `titan model download {name}` and set the folder that it prints"
        ) from None
    return str(Path(folder))
