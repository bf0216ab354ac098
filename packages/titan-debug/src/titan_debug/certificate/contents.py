"""The file that ``titan verify --certificate`` writes. Imports no torch.

It says of a recipe, with its config, code, data and initial weights: on these meshes, the losses, gradients and weights of
some steps equalled those of one device. The weights are kept as fingerprints, so that others can be compared with them.

The checksum of a parameter, over (index, bits) of all elements, shows whether two parameters are bitwise equal. Its
projections onto random directions of +-1 show how far two are apart without either of them: the mean square of the
differences between projections is an unbiased estimate of the squared distance (Achlioptas, "Database-friendly random
projections", 2003). Both find accidents, and so does the digest of the file; a certificate can be forged.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from operator import add
from pathlib import Path
from typing import Annotated, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from titan_core.api import UserError
from titan_core.toolkit.atomic_write import atomic_write
from titan_core.toolkit.plain_json import read_object
from titan_core.toolkit.runs.files import DEBUG
from titan_core.toolkit.text import shorten

PROJECTIONS: Final = 16
WEIGHTS: Final = f"{DEBUG}/weights.json"
"""A run's file of its weights, with ``numerics.record_weights``."""
_LEAST_UPDATE = 1e-2
"""Smallest update of a parameter that its difference is relative to, as a share of the mean update of all elements. Of an
update that is zero in theory, such as that of a key's bias, only rounding errors remain."""
_LONGEST = 64 * 2**20
"""Bytes of a certificate: 50,000 parameters."""


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


T = TypeVar("T", bound=_Plain)


class Fingerprint(_Plain):
    """The fingerprint of a parameter."""

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    checksum: str
    """16 hexadecimal digits."""
    squares: float
    """Sum of the squares of the elements."""
    projections: Annotated[tuple[float, ...], Field(min_length=PROJECTIONS, max_length=PROJECTIONS)]

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of a parameter of which these are the contributions of two parts."""
        return Fingerprint(
            shape=self.shape,
            dtype=self.dtype,
            checksum=f"{(int(self.checksum, 16) + int(other.checksum, 16)) % 2**64:016x}",
            squares=self.squares + other.squares,
            projections=tuple(map(add, self.projections, other.projections)),
        )

    def distance(self, other: Fingerprint) -> float:
        """Return an estimate of the Euclidean distance between this parameter and another one of its shape."""
        pairs = zip(self.projections, other.projections, strict=True)
        return math.sqrt(sum((one - two) ** 2 for one, two in pairs) / PROJECTIONS)


Fingerprints = Mapping[str, Fingerprint]
"""By the parameter's name."""


class Recorded(_Plain):
    """The weights that a run recorded (:data:`WEIGHTS`)."""

    first: int
    """Step after which ``before`` was read: 0 for a new run."""
    step: int
    """Step after which ``after`` was read."""
    device: str
    before: Annotated[dict[str, Fingerprint], Field(min_length=1)]
    after: dict[str, Fingerprint]

    @model_validator(mode="after")
    def _require_the_same_parameters(self) -> Self:
        shapes = [{name: one.shape for name, one in weights.items()} for weights in (self.before, self.after)]
        if shapes[0] != shapes[1]:
            raise ValueError("before and after are of different parameters")
        return self


class OnMesh(_Plain):
    """Differences between a mesh and one device."""

    losses: float
    """Largest relative difference between the losses of a step."""
    gradients: float
    """Largest relative difference between the rms, or mean, of a parameter's gradients in a step."""
    gradient: str
    """That parameter."""
    weights: float
    """Largest difference between the updates of a parameter over all steps (:func:`differences`)."""
    weight: str
    """That parameter."""
    tolerance: float
    """Largest difference of a loss that counted as rounding."""


class Certificate(_Plain):
    """The contents of a certificate."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    made: str
    """Date and time in UTC."""
    recipe: str
    steps: Annotated[int, Field(ge=1)]
    global_batch_size: int
    losses: Annotated[dict[int, float], Field(min_length=1)]
    """Of one device, by step."""
    meshes: Annotated[dict[str, OnMesh], Field(min_length=1)]
    """By mesh, as ``titan job show`` prints it."""
    config: dict[str, object]
    """The keys that affect what is trained, if they differ from their defaults."""
    code: dict[str, str]
    """Version and digest of each package, and the versions of Python and torch."""
    data: str
    """Digest of the tokens, weights and documents of all steps."""
    weights: Recorded
    """Those of one device."""

    def write(self, file: Path) -> None:
        """
        Raises:
            UserError: the file cannot be written.
        """
        contents = self.model_dump(mode="json")
        text = json.dumps({"sha256": digest_of_contents(contents), "certificate": contents}, indent=1) + "\n"
        try:
            with atomic_write(file) as part:
                part.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError.one(
                f"--certificate {file}", f"cannot be written: {error.strerror}", "choose another file"
            ) from None


def read_certificate(file: Path) -> Certificate:
    """
    Raises:
        UserError: the file is no certificate, or has been changed since it was written.
    """
    fix = "pass a file that `titan verify --certificate FILE` has written, unchanged"
    found = read_object(file, fix, longest=_LONGEST)
    contents = found.get("certificate")
    if set(found) != {"sha256", "certificate"} or not isinstance(contents, dict):
        raise UserError.one(str(file), "is no certificate", fix)
    if found["sha256"] != digest_of_contents(contents):
        raise UserError.one(str(file), "was changed after it was written: its sha256 is of other contents", fix)
    return _parsed(Certificate, contents, file, fix)


def read_recorded(run: Path) -> Recorded:
    """Return the weights that the run in directory ``run`` has recorded.

    Raises:
        UserError: it has not, or the file is damaged.
    """
    fix = "train the run again with numerics.record_weights = true"
    return _parsed(Recorded, read_object(run / WEIGHTS, fix, longest=_LONGEST, inside=run), run / WEIGHTS, fix)


def _parsed(cls: type[T], contents: object, file: Path, fix: str) -> T:
    """
    Raises:
        UserError: ``contents`` of ``file`` are not those of ``cls``.
    """
    try:
        return cls.model_validate_json(json.dumps(contents))
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        where = ".".join(map(str, mistake["loc"]))
        raise UserError.one(str(file), f"cannot be used: {shorten(where)}: {mistake['msg']}", fix) from None


def digest_of_contents(contents: object) -> str:
    """Return the SHA-256 of a certificate's contents, whatever the order and the form of its JSON."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unequal(one: Fingerprints, two: Fingerprints) -> str:
    """Return the first parameter that is not bitwise the same in both; empty if there is none."""
    names = sorted({*one, *two})
    return next((name for name in names if _parameter(one, name) != _parameter(two, name)), "")


def _parameter(of: Fingerprints, name: str) -> object:
    found = of.get(name)
    return found and (found.shape, found.dtype, found.checksum)


def differences(before: Fingerprints, after: Fingerprints, other: Fingerprints) -> Iterator[tuple[float, str]]:
    """Yield how far each parameter of ``other`` is from ``after``, relative to its update, its change since ``before``. All
    have the same parameters."""
    updates = {name: before[name].distance(one) for name, one in after.items()}
    sizes = {name: math.prod(one.shape) for name, one in after.items()}
    mean = math.sqrt(sum(update**2 for update in updates.values()) / max(sum(sizes.values()), 1))
    for name, one in after.items():
        least = max(updates[name], _LEAST_UPDATE * mean * math.sqrt(sizes[name]), 1e-30)
        yield one.distance(other[name]) / least, name
