"""``titan doctor --full``: whether datasets, tokenizers and weights can be downloaded."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

from titan_core.api import CheckResult, Health, HealthContext
from titan_core.api.config.secrets import redact_text

_PATIENCE_SECONDS = 5.0
_OFFLINE = "jobs that name a hub dataset or repository need it in the local cache"


def check(context: HealthContext) -> Iterator[CheckResult]:
    """Check whether the Hugging Face Hub, or the mirror that ``HF_ENDPOINT`` names, answers. Uses the proxies of the
    environment."""
    from huggingface_hub import constants

    yield CheckResult("cache", Health.OK, constants.HF_HUB_CACHE)
    endpoint = redact_text(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        yield CheckResult("hub", Health.NOTE, f"HF_HUB_OFFLINE is set: {_OFFLINE}")
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            yield CheckResult(
                "hub", Health.WARNING, f"{endpoint} answers with status {error.code}: {_OFFLINE}", "try again later"
            )
            return
    except (OSError, ValueError) as error:
        why = f"{endpoint} does not answer ({redact_text(str(getattr(error, 'reason', error)))}): {_OFFLINE}"
        fix = "check the network, set HTTPS_PROXY, or set HF_ENDPOINT to a mirror"
        yield CheckResult("hub", Health.WARNING, why, fix)
        return
    yield CheckResult("hub", Health.OK, f"{endpoint} answers")
