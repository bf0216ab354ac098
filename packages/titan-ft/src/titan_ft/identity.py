"""What must be the same in all replica groups of a job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from titan_core.api import Problem, UserError, matches
from titan_core.toolkit.jobs import AssembledJob
from titan_core.toolkit.text import show

_TRAINED = ("model", "training", "data", "parallelism", "objective", "optimizer", "lr_scheduler")
"""Sections whose keys must be the same although a resumed run may change some of them."""
_OF_THE_MACHINE = ("training.stop_at_step", "training.dataset_path", "model.tokenizer_path", "model.from_pretrained")


def identity_of(job: AssembledJob) -> dict[str, Any]:
    """Return the config keys that affect what is trained, the mesh, and the versions of plugins and torch, as JSON values
    without secrets."""
    resolved = job.identity()
    values = resolved["config"]
    found: dict[str, Any] = {}
    for cls in job.config.sections:
        for name in cls.model_fields:
            key = f"{cls.section}.{name}"
            if key not in _OF_THE_MACHINE and (cls.section in _TRAINED or not matches(name, cls.may_change)):
                found[key] = values.get(cls.section, {}).get(name)
    found |= {f"mesh {name}": degree for name, degree in job.mesh.degrees.items()}
    found |= {f"version of {name}": number for name, number in resolved["plugins"].items()}
    found["version of torch"] = torch.__version__
    plain: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return plain


def digest_of(identity: Mapping[str, Any]) -> int:
    """Return 32 bits of a hash, of which float64 adds up two million exactly."""
    text = json.dumps(identity, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def require_same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compare this group's identity with that of the group whose state it received.

    Raises:
        UserError: lists the differences.
    """
    keys = dict.fromkeys((*mine, *theirs))
    different = [key for key in keys if mine.get(key) != theirs.get(key)]
    if different:
        fix = "start all replica groups with the same recipe, overrides and packages"
        raise UserError(
            *(
                Problem(key, f"is {show(mine.get(key))} in this replica group, but {show(theirs.get(key))} in its peer", fix)
                for key in different
            )
        )
