"""Random configs: each is read, checked and assembled, as ``titan config check`` and ``job show`` do."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.fuzz.values import ABSURD, random_value
from titan_core.api import Model, Recipe, RunStopped, UserError
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.cli.job import describe
from titan_core.config.load import load_config
from titan_core.config.render import to_toml
from titan_core.job.assemble import assemble
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import parse_overrides
from titan_core.toolkit.errors import PluginFailure

LONGEST_SECONDS = 10
MEMORY = 4 * 2**30
"""Address space that a case may use beyond that of the process before, in bytes."""
LARGEST = 1e13
"""No key but the seed has a meaningful value beyond this."""
TRAINED_EVERY = 250
"""One in this many cases is trained for two steps, if it is valid and tiny."""
TINY: dict[str, dict[str, Any]] = {
    "model": {
        "name": "llama3",
        "flavor": "debug",
        "args": {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
    },
    "training": {"seq_len": 16, "local_batch_size": 2, "steps": 2},
    "lr_scheduler": {"warmup_steps": 1},
}  # fmt: skip


class TookTooLong(BaseException):
    """A case exceeded its time limit. Not an ``Exception``, because the code under test might catch it."""


@dataclass(frozen=True)
class Case:
    """One config."""

    text: bytes | None
    """Contents of the recipe file; ``None`` uses the recipe named ``recipe``."""
    recipe: str
    overrides: list[str] = field(default_factory=list)
    world_size: int | None = None

    def __str__(self) -> str:
        text = f" from {self.text[:300]!r}" if self.text is not None else f" of {self.recipe[:80]!r}"
        overrides = [override[:120] for override in self.overrides]
        return f"world size {self.world_size}, overrides {overrides}{text}"


def run(count: int, seed: int, folder: Path) -> list[str]:
    """Run ``count`` cases of ``seed``; return the failures. The number of a case and the seed are enough to repeat it."""
    registry = Components.from_installed()
    keys = keys_of(registry)
    with contextlib.chdir(folder):
        # Runs before time and memory are limited: importing torch needs more than a case may use.
        plain = check(Case(tomli_w.dumps(TINY).encode(), "fuzz.toml", [], 1), registry, folder, train=True)
    cases = [_numbered(number, seed, registry, keys) for number in range(count)]
    found = run_limited(cases, registry, folder)
    failures = [f"case {number} of seed {seed}: {failure}" for number, failure in enumerate(found) if failure]
    return [f"the valid recipe: {plain}", *failures] if plain else failures


def run_limited(cases: list[Case], registry: Components, folder: Path) -> list[str]:
    """Run each case within limits of time and memory; return its failure, empty if there is none."""
    failures: list[str] = []
    with contextlib.chdir(folder), _limits() as limited:
        for number, made in enumerate(cases):
            trained = number % TRAINED_EVERY == 0
            try:
                failure = limited(lambda made=made, trained=trained: check(made, registry, folder, trained))
            except TookTooLong:
                failure = f"took longer than {LONGEST_SECONDS} s"
            failures.append(f"{failure}\n    {made}" if failure else "")
    return failures


def _numbered(number: int, seed: int, registry: Components, keys: dict[tuple[str, str], Any]) -> Case:
    """Return case ``number`` of ``seed``. A case to be trained is a variant of the tiny recipe."""
    rng = random.Random(f"{seed}/{number}")
    if number % TRAINED_EVERY == 0:
        return Case(_structured(rng, keys), "fuzz.toml", [], 1)
    return case(rng, registry, keys)


def keys_of(registry: Components) -> dict[tuple[str, str], Any]:
    """Return the type of each (section, key). The arguments of every model family are in section ``model.args``."""
    keys = {
        (name, key): info.annotation
        for name, owners in registry.sections().items()
        for cls in owners
        for key, info in cls.model_fields.items()
    }
    for model in registry.all(Model):
        for key, info in type(next(iter(model.flavors.values()))).model_fields.items():
            keys["model.args", key] = info.annotation
    return keys


def case(rng: random.Random, registry: Components, keys: dict[tuple[str, str], Any]) -> Case:
    """Return a random case."""
    world_size = rng.choice((None, None, 1, 1, 1, 2, 4, 7, 8, 512, 2**20))
    kind = rng.random()
    if kind < 0.5:
        return Case(_structured(rng, keys), "fuzz.toml", _overrides(rng, keys, 0.2), world_size)
    if kind < 0.75:
        return Case(_mutated(rng, registry), "fuzz.toml", [], world_size)
    recipe = rng.choice(
        (
            *registry.names(Recipe),
            "llama3_debug",
            "llama3_debug",
            "",
            "no such",
            "a" * 300 + ".toml",
            "/dev/zero",
            ".",
            "x\0.toml",
        )
    )
    return Case(None, recipe, _overrides(rng, keys, 1.0), world_size)


def _structured(rng: random.Random, keys: dict[tuple[str, str], Any]) -> bytes:
    tables: dict[str, Any] = json.loads(json.dumps(TINY)) if rng.random() < 0.8 else {}
    for section, key in rng.sample(list(keys), rng.randint(0, 5)):
        table = tables
        for part in section.split("."):
            table = table.setdefault(part, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table[key] = random_value(keys[section, key], rng)
    if rng.random() < 0.05:
        tables[rng.choice(("training", "nonsense", "", "a.b"))] = rng.choice(ABSURD)
    try:
        return tomli_w.dumps(tables).encode(errors="surrogatepass")
    except (TypeError, ValueError, RecursionError):  # TOML cannot express the value; overrides cover such values
        return b"[training]\nsteps = 1\n"


def _mutated(rng: random.Random, registry: Components) -> bytes:
    recipes = registry.all(Recipe)
    data = bytearray(rng.choice(recipes).file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        place = rng.randrange(len(data) + 1)
        what = rng.randrange(9)
        if what == 0:
            data[place : place + rng.randint(1, 20)] = b""
        elif what == 1:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        elif what == 2 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif what == 3:
            data[place:] = b""
        elif what == 4:
            data[place:place] = rng.choice(
                (b"[" * 1000, b"{a=" * 1000, b"x=" + b"[" * 5000, b"a." * 2000, b"9" * 5000, b"\0", b"\xff")
            )
        elif what == 5:
            data = bytearray(
                bytes(data).decode("utf-8", "replace").encode(rng.choice(("utf-16", "latin-1", "utf-8-sig")), "replace")
            )
        elif what == 6:
            lines = bytes(data).splitlines(keepends=True)
            rng.shuffle(lines)
            data = bytearray(b"".join(lines))
        elif what == 7:
            data += bytes(data[place:])
        else:
            digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
            if digits:
                at = rng.choice(digits)
                data[at : at + 1] = rng.choice(
                    (b"-1", b"1e300", b"nan", b"0x" + b"f" * 5000, b"9" * 40, b"9" * 5000, b"inf")
                )
    return bytes(data)


def _overrides(rng: random.Random, keys: dict[tuple[str, str], Any], share: float) -> list[str]:
    arguments: list[str] = []
    if rng.random() >= share:
        return arguments
    for section, key in rng.sample(list(keys), rng.randint(1, 4)):
        value = random_value(keys[section, key], rng)
        flag = rng.choice((f"--{section}.{key}", f"--{section}.{key}".replace("_", "-")))
        if rng.random() < 0.05:
            flag = rng.choice(
                ("--a.b.c.d", "--.", "--training.", "--.steps", "--training.steps.x", "-x", "steps", "--" + "a." * 500 + "b")
            )
        arguments.append(f"{flag}={_toml(value)}")
    return arguments


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    try:
        return tomli_w.dumps({"value": value}).partition("=")[2].strip()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def check(made: Case, registry: Components, folder: Path, train: bool = False) -> str:
    """Run a case; return its failure, empty if there is none."""
    file = folder / "fuzz.toml"
    if made.text is not None:
        file.write_bytes(made.text)
    began = time.monotonic()
    try:
        config, left = load_config(
            str(file) if made.text is not None else made.recipe, parse_overrides(made.overrides), registry
        )
        job = assemble(config, left, made.world_size)
        to_toml(config).encode()
        json.dumps(describe(job), allow_nan=False).encode()
    except PluginFailure as error:
        return f"a Titan plugin failed: {error}"
    except UserError as error:
        str(error).encode(errors="backslashreplace")
        return ""
    except Exception:  # noqa: BLE001 - any other exception is a failure
        return traceback.format_exc(limit=-6).replace("\n", "\n    ")
    if time.monotonic() - began > LONGEST_SECONDS:
        return f"took {time.monotonic() - began:.0f} s"
    for key, value in _numbers(config.as_dict()):
        if not math.isfinite(value) or (abs(value) > LARGEST and key != "training.seed"):
            return f"accepted {key} = {value}"
    return _train(job) if train and _is_tiny(job) else ""


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _is_tiny(job: AssembledJob) -> bool:
    batch, sections = job.batch, job.config.as_dict()
    return (
        job.mesh.world_size == 1
        and job.model.num_params < 10**6
        and batch.tokens_per_step < 10**4
        and job.data.datasets[0].context.name == "stdlib"
        and sections["data"]["num_workers"] == 0
        and not sections["compile"]["enable"]
        and not sections["validation"]["enable"]
    )


def _train(job: AssembledJob) -> str:
    """Train the few steps of a job without output; return the failure, empty if there is none."""
    from titan_core.loop.training import train

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(job)
    except PluginFailure as error:
        return f"a Titan plugin failed in training: {error}"
    except (UserError, RunStopped):
        return ""
    except Exception:  # noqa: BLE001 - any other exception is a failure
        return "training: " + traceback.format_exc(limit=-6).replace("\n", "\n    ")
    return ""


@contextlib.contextmanager
def _limits() -> Iterator[Callable[[Callable[[], str]], str]]:
    """Yield a function that calls another one within limits of time and memory."""

    def ring(signum: int, frame: object) -> None:
        raise TookTooLong

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before, limits = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)

    def call(function: Callable[[], str]) -> str:
        signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, limits[1]))
    try:
        yield call
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)
