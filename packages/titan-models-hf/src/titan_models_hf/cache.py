"""Facts of models that this machine has derived before: JSON by a hash of the arguments and of all that derives them.
Imports neither torch nor transformers, unless a model must be derived."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.cache_folder import cache_folder
from titan_models_hf.config import HFArgs
from titan_models_hf.facts import Facts

log = logging.getLogger(__name__)


def facts_of(args: HFArgs) -> Facts:
    """Return the facts of a model: from the cache of this machine, or derived from the library, which takes seconds.

    Raises:
        UserError: the library does not know the model, or Titan does not understand it.
    """
    return _facts_of(args.text)


@lru_cache(maxsize=16)
def _facts_of(text: str) -> Facts:
    architecture, config = json.loads(text)
    file = cache_folder("models-hf") / f"{_key(text)}.json"
    try:
        return Facts.model_validate_json(file.read_bytes())
    except OSError:
        pass  # not derived yet
    except ValidationError as error:
        log.warning("%s: derived again, because it is damaged: %s", file, error)
    facts = _derived(HFArgs(architecture=architecture, config=config))
    try:
        with atomic_write(file) as part:
            part.write_text(facts.model_dump_json(), encoding="utf-8")
    except OSError as error:
        log.warning("%s: not written, so the next start derives the model again: %s", file, error)
    return facts


def _derived(args: HFArgs) -> Facts:
    """Derive the facts without the garbage collector, which takes a tenth of the time to import the library and finds
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        from titan_models_hf.derive import derive

        return derive(args)
    finally:
        (gc.enable if enabled else gc.disable)()


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """Return what the facts depend on besides the arguments."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    digest.update(f"{version('transformers')} {version('torch')}".encode())
    return digest.digest()


def _key(text: str) -> str:
    return hashlib.sha256(_sources() + text.encode()).hexdigest()[:32]
