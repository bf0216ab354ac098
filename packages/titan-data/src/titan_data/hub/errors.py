"""Errors of ``huggingface_hub`` and its HTTP client in one line, without the access token."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from titan_core.api import Problem, UserError
from titan_core.toolkit.reading import is_transient
from titan_core.toolkit.secrets import REDACTED, redact_text

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_ELSEWHERE = "run the command on a machine with network access and copy its folder"
RESUME = "run the same command again to resume"


@contextmanager
def hub_errors(name: str, token: str | None, revision: str | None = None, parses: bool = False) -> Iterator[None]:
    """Convert errors of the hub, the network and the disk within the block to a ``UserError``.

    Args:
        name: the repository, for messages.
        token: the access token that is sent, which no message may contain.
        parses: whether ``huggingface_hub`` parses an answer in the block: a ``ValueError`` is then the server's fault.
    """
    _require_library()
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        # The exception classes of the hub's HTTP client differ between its versions.
        problem = _explained(error, name, revision, token)
        if problem is None and parses and isinstance(error, ValueError | KeyError | TypeError):
            reason = without_token(f"{type(error).__name__}: {error}", token)
            why = f"{_endpoint()} does not answer as a hub does ({reason})"
            problem = Problem(name, why, "check HF_ENDPOINT and the proxy")
        if problem is None:
            raise
        raise UserError(problem) from None


def _require_library() -> None:
    try:
        import huggingface_hub.constants  # noqa: F401 - reads the environment
    except ImportError as error:
        fix = "run `pip install huggingface-hub`"
        raise UserError.one("package huggingface-hub", f"cannot be used: {error}", fix) from None
    except ValueError as error:
        why = f"a variable of huggingface_hub has an invalid value: {error}"
        raise UserError.one("environment", why, "check HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT") from None


def without_token(text: str, token: str | None) -> str:
    """Return ``text`` in one line, without ``token`` and other secrets (those of signed URLs, for example)."""
    text = " ".join(text.split())
    return redact_text(text.replace(token, REDACTED) if token else text)


def _explained(error: Exception, name: str, revision: str | None, token: str | None) -> Problem | None:
    """Return the problem that ``error`` means for a user; ``None`` if it is a defect of the program."""
    from huggingface_hub import errors

    endpoint = _endpoint()
    page = f"{endpoint}/{name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        variable = next((one for one in _OFFLINE if os.environ.get(one)), _OFFLINE[0])
        return Problem(name, f"cannot be downloaded: {variable} is set", f"unset it, or {_ELSEWHERE}")
    if isinstance(error, errors.GatedRepoError):
        why = "is gated, and the token in HF_TOKEN has no access to it" if token else "is gated, and HF_TOKEN is not set"
        fix = f"request access at {page}" + ("" if token else ", and set HF_TOKEN to a token of that account")
        return Problem(name, why, fix)
    if isinstance(error, errors.RevisionNotFoundError):
        return Problem(name, f"has no revision {revision!r}", f"choose a branch, tag or commit from {page}/commits")
    if isinstance(error, errors.RepositoryNotFoundError) or _status(error) == 401:
        if not token:
            why = f"does not exist on {endpoint}, or is private"
            return Problem(name, why, "check the name; if it is private, set HF_TOKEN")
        if _status(error) == 401:
            return Problem(name, f"{endpoint} does not accept the token in HF_TOKEN", "set a valid token, or unset it")
        why = f"does not exist on {endpoint}, or the token in HF_TOKEN has no access to it"
        return Problem(name, why, "check the name and the token")
    if isinstance(error, errors.HFValidationError):
        local = ": a local folder needs no download" if os.path.exists(name) else ""
        return Problem(repr(name), "is not the name of a repository", f"write it as OWNER/NAME{local}")
    if (status := _status(error)) is not None:
        return _of_status(status, name, endpoint, bool(token))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Problem(name, "no space is left on the disk", f"free some, and {RESUME}")
    if isinstance(error, OSError) and "Consistency check failed" in str(error):
        return Problem(name, f"{endpoint} ended a download too early", RESUME)
    if isinstance(error, OSError) and error.filename is not None:
        where = os.fsdecode(error.filename)
        return Problem(where, f"cannot be written: {error.strerror}", "choose another folder with --output")
    return _unreachable(error, name, endpoint, token) if is_transient(error) else None


def _unreachable(error: Exception, name: str, endpoint: str, token: str | None) -> Problem:
    reason = without_token(str(error), token) or type(error).__name__
    proxies = [variable for variable in _PROXIES if os.environ.get(variable)]
    proxy = f"the proxy in {proxies[0]}" if proxies else "HTTPS_PROXY"
    fix = f"check the network, {proxy} and HF_ENDPOINT, and run the same command again (it resumes); or {_ELSEWHERE}"
    return Problem(name, f"cannot be downloaded: {endpoint} cannot be reached ({reason})", fix)


def _of_status(status: int, name: str, endpoint: str, has_token: bool) -> Problem:
    why = f"{endpoint} answers with HTTP status {status}"
    if status == 403:
        fix = "check that the token in HF_TOKEN may read it" if has_token else "set HF_TOKEN to a token that may read it"
        return Problem(name, f"access is denied: {why}", fix)
    if status == 404:
        return Problem(name, why, "check the name, the revision and HF_ENDPOINT")
    if status == 429:
        return Problem(name, f"{why} (too many requests)", f"wait a few minutes, and {RESUME}")
    return Problem(name, why, RESUME if status >= 500 else "check HF_ENDPOINT and the proxy")


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _endpoint() -> str:
    from huggingface_hub import constants

    return redact_text(constants.ENDPOINT)
