"""``titan certificate``: compares a recipe, a run or weights with a certificate of ``titan verify``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from titan_core.api import CommandContext
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.toolkit.arguments import json_argument, number
from titan_core.toolkit.runs.files import CONFIG
from titan_core.toolkit.runs.run_log import RunLog
from titan_core.toolkit.text import print_json, print_table, say, show
from titan_debug.certificate.certify import code_of, config_of, data_of
from titan_debug.certificate.contents import (
    WEIGHTS,
    Certificate,
    Fingerprints,
    differences,
    read_certificate,
    read_recorded,
    unequal,
)
from titan_debug.verify.meshes import ONE_DEVICE

EXIT_DIFFERENT = 1
TOLERANCE, TIMES = 1e-3, 100
"""Largest difference between weights, relative to the update, that counts as rounding; more if the certificate's meshes
differ by more than a hundredth of it from one device, as in bfloat16."""
_WORDS = {True: "same", False: "DIFFERS", None: "not compared"}
_SHOWN = 3
_SMALL = 0.05
"""Update, relative to the parameter, of which bfloat16 rounds away several per cent."""


class Compared(NamedTuple):
    """The comparison of one thing with the certificate."""

    what: str
    same: bool | None
    """``None``: it could not be compared."""
    found: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan certificate``."""
    parser.add_argument("certificate", metavar="FILE", help="a file that `titan verify --certificate FILE` has written")
    parser.add_argument(
        "compared", nargs="?", metavar="RECIPE|FILE|RUN",
        help="what to compare: the name of a recipe, a TOML file, or a run's directory, whose losses are compared too",
    )  # fmt: skip
    parser.add_argument(
        "--weights", metavar="DIR",
        help="weights to compare with those after the certificate's steps: a checkpoint, or an export of any trainer",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=number("a relative difference", 0.0, 1e6), metavar="X",
        help=f"largest difference of weights, relative to what training changed, that counts as rounding (default: "
             f"{TOLERANCE:g}, or {TIMES} times that of the certificate's meshes)",
    )  # fmt: skip
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Compare, print a table, and return 1 if something differs."""
    arguments = context.arguments
    certificate = read_certificate(Path(arguments.certificate))
    rows = list(_rows(context, certificate))
    same = all(row.same is not False for row in rows)
    if arguments.json:
        statement = certificate.model_dump(mode="json", include={"made", "recipe", "steps", "meshes"})
        print_json({"certificate": statement, "same": same, "compared": [row._asdict() for row in rows]})
    else:
        device, torch = certificate.weights.device, certificate.code.get("torch", "unknown")
        made = f"{certificate.made}, on {device} with torch {torch}"
        say(f"{certificate.recipe}: {certificate.steps} steps ({made}) equal those of one device on")
        shown = [
            (name, f"{one.losses:.1e}", f"{one.gradients:.1e} ({one.gradient})", f"{one.weights:.1e} ({one.weight})")
            for name, one in certificate.meshes.items()
        ]
        print_table(("mesh", "losses within", "gradients", "updates of weights"), shown)
        print()
        print_table(("", "", "found"), [(row.what, _WORDS[row.same], row.found) for row in rows])
    return 0 if same else EXIT_DIFFERENT


def _rows(context: CommandContext, certificate: Certificate) -> Iterator[Compared]:
    arguments = context.arguments
    log = RunLog.read(arguments.compared) if arguments.compared and Path(arguments.compared).is_dir() else None
    yield _mapping("code", certificate.code, code_of(context.registry))
    if arguments.compared:
        arguments.recipe = str(log.path / CONFIG) if log else arguments.compared
        starts = [event for event in log.events if event["event"] == "start"] if log else []
        job = context.job(starts[-1]["world_size"] if starts else None, missing_ok=True)
        yield _mapping("config", certificate.config, config_of(job))
        size = job.batch.global_size
        yield Compared("global batch", size == certificate.global_batch_size, f"{size} sequences")
        yield _data(context, certificate, job)
        mesh = str(job.mesh)
        yield Compared("mesh", mesh == ONE_DEVICE or mesh in certificate.meshes, mesh)
        if log is not None:
            yield _losses(certificate, log, mesh)
            recorded = read_recorded(log.path) if (log.path / WEIGHTS).exists() else None
            if recorded and not recorded.first:
                name = unequal(certificate.weights.before, recorded.before)
                yield Compared("initial weights", not name, f"{name} has other values" if name else "bitwise")
    if arguments.weights:
        yield _weights(certificate, read_weights(context, arguments.weights), arguments.tolerance)


def _mapping(what: str, expected: Mapping[str, object], found: Mapping[str, object]) -> Compared:
    """Compare what the certificate has; a package that it lacks changes nothing unless the config uses it."""
    keys = expected if what == "code" else {**expected, **found}
    wrong = [key for key in keys if expected.get(key) != found.get(key)]
    shown = [f"{key}: {_shown(found, key)} instead of {_shown(expected, key)}" for key in wrong[:_SHOWN]]
    more = [f"{len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    return Compared(what, not wrong, "; ".join(shown + more) or f"{len(keys)} {'packages' if what == 'code' else 'keys'}")


def _shown(values: Mapping[str, object], key: str) -> str:
    return show(values[key], key) if key in values else "nothing"


def _data(context: CommandContext, certificate: Certificate, job: AssembledJob) -> Compared:
    if job.missing:
        return Compared("data", None, "; ".join(map(str, job.missing)))
    found = data_of(context, job, certificate.steps)
    return Compared("data", found == certificate.data, f"sha256 {found[:16]} of {certificate.steps} global batches")


def _losses(certificate: Certificate, log: RunLog, mesh: str) -> Compared:
    found = {record["step"]: record["loss"] for record in log.steps if record["step"] in certificate.losses}
    if not found:
        return Compared("losses", None, f"the run has logged none of steps 1 to {certificate.steps}")
    losses = ((certificate.losses[step], math.nan if loss is None else loss) for step, loss in found.items())
    largest = max((abs(one - two) / max(abs(one), 1e-30) for one, two in losses), key=lambda x: (x != x, x))
    known = certificate.meshes.get(mesh) or min(certificate.meshes.values(), key=lambda one: one.tolerance)
    return Compared("losses", largest <= known.tolerance, f"within {largest:.1e} in {len(found)} steps")


def read_weights(context: CommandContext, path: str) -> Fingerprints:
    """Return the fingerprints of stored weights.

    Raises:
        UserError: no installed plugin can read them.
    """
    from titan_debug.certificate.fingerprints import fingerprints

    stored = context.models.find(path)
    # An export may have no tokenizer, and a job needs one.
    stored = replace(stored, sections={**stored.sections, "model": {"tokenizer": "byte", **stored.sections["model"]}})
    with context.models.open(context.models.job(stored, 1), stored) as loaded:
        return fingerprints(loaded.part.named_parameters())


def _weights(certificate: Certificate, found: Fingerprints, tolerance: float | None) -> Compared:
    before, after = certificate.weights.before, certificate.weights.after
    shapes = [{name: list(one.shape) for name, one in weights.items()} for weights in (after, found)]
    if shapes[0] != shapes[1]:
        return _mapping("weights", *shapes)
    if tolerance is None:
        tolerance = max(TOLERANCE, *(TIMES * one.weights for one in certificate.meshes.values()))
    largest, name = max(differences(before, after, found))
    text = f"{name} is {largest:.1e} of its update away from one device's after step {certificate.weights.step}"
    if largest > tolerance and not unequal(before, found):
        text = "these are the initial weights, and not those after the certificate's steps"
    elif largest > tolerance:
        size = before[name].distance(after[name]) / max(math.sqrt(after[name].squares), 1e-30)
        text += f" (training changed it by {100 * size:.2g} %: 16 bits may not resolve it)" if size < _SMALL else ""
    return Compared("weights", largest <= tolerance, text)
