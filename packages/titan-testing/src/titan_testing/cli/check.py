"""``titan plugin check``: tries the components of a plugin on this machine, in a minute or two."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from titan_core.api import (
    CommandContext,
    Component,
    Model,
    Objective,
    Observer,
    Recipe,
    RecordFormat,
    Ref,
    Transform,
    UserError,
)
from titan_core.api.plugins.assembled_job import AssembledJob
from titan_core.job.elastic import load_job
from titan_core.plugins.discovery import Plugin
from titan_core.plugins.registry import Components
from titan_core.toolkit.arguments import json_argument, rank_count
from titan_core.toolkit.errors import EXIT_USER_ERROR, PluginFailure, nearest
from titan_core.toolkit.text import print_json, print_table, say
from titan_testing.checks import NotTried
from titan_testing.checks.registration import check_import, check_metadata, check_references, check_summary
from titan_testing.settings import PATHS, SMALL, inline, is_usable, selecting

MESHES = ("FSDP 2", "TP 2", "CP 2", "PP 2, 1F1B")
_WORDS = {True: "ok", False: "WRONG", None: "not tried"}
_LONGEST = 100
"""Characters of a result in the table."""


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    component: str
    check: str
    passed: bool | None
    """``None`` if it could not be tried, for want of a file."""
    detail: str
    """What was found, what is wrong, or what is needed: where, why, and the fix."""
    seconds: float


Check = tuple[str, str, Callable[[], str]]
"""The component, the name of the check, and the check."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``titan plugin check``."""
    parser.add_argument("name", metavar="NAME", help="a plugin or its distribution, as `titan plugins` lists it")
    parser.add_argument("--args", default="", metavar="{...}", help="arguments of its models, as an inline table of TOML")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a config key of the jobs, such as racks.count=2 to switch a transform or an observer on; may be repeated",
    )  # fmt: skip
    parser.add_argument("--ranks", type=rank_count, default=2, metavar="N", help="ranks of jobs with --set (default: 2)")
    parser.add_argument(
        "--reader", default="", metavar="MODULE:FUNCTION",
        help="reads exported weights with code that shares nothing with the weight format: (folder, token ids) -> logits "
        "(default: the class of transformers that config.json names)",
    )  # fmt: skip
    json_argument(parser)


def run(context: CommandContext) -> int:
    """Check a plugin, print a table, and return 2 if something is wrong."""
    arguments = context.arguments
    assert isinstance(context.registry, Components)
    plugin = _plugin(context.registry, arguments.name)
    settings = dict(_setting(text) for text in arguments.set)
    results = []
    with _Jobs() as jobs:
        for component, name, check in _checks(plugin, settings, arguments.args, arguments.ranks, jobs, arguments.reader):
            results.append(_result(component, name, check))
            if not arguments.json:
                say(f"{component}: {name}: {_WORDS[results[-1].passed]}", flush=True)
    passed = not any(one.passed is False for one in results)
    if arguments.json:
        print_json({"plugin": plugin.name, "passed": passed, "checks": list(map(asdict, results))})
    else:
        print()
        rows = [(one.component, one.check, _WORDS[one.passed], shortened(one.detail)) for one in results]
        print_table(("component", "check", "", "found"), rows)
        for one in results:
            if one.passed is False:
                say(f"\n{one.component}, {one.check}: {one.detail}")
    return 0 if passed else EXIT_USER_ERROR


def shortened(text: str) -> str:
    """Return what the table shows of a result; a wrong one follows it whole."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _plugin(registry: Components, name: str) -> Plugin:
    found = registry.found
    for broken in found.broken:
        if name in (broken.name, broken.distribution):
            raise UserError.one(f"plugin {broken.name!r} ({broken.distribution} {broken.version})", broken.reason, "fix it")
    for plugin in found.plugins:
        if name in (plugin.name, plugin.distribution, plugin.distribution.replace("-", "_")):
            return plugin
    names = [plugin.name for plugin in found.plugins]
    raise UserError.one(f"plugin {name!r}", "is not installed", nearest(name, names))


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UserError.one(f"--set {text}", "is no KEY=VALUE", "write it like --set racks.count=2")
    # Jobs run in folders of their own. A name, such as that of an optimizer, may also be that of a folder here.
    names_file = (key in PATHS.values() or "/" in value) and Path(value).exists()
    return key, str(Path(value).absolute()) if names_file else value


def _checks(plugin: Plugin, settings: Mapping[str, str], args: str, ranks: int, jobs: _Jobs, reader: str) -> Iterator[Check]:
    where = f"plugin {plugin.name}"
    yield where, "metadata", partial(check_metadata, plugin)
    yield where, "import", partial(check_import, plugin)
    for component in plugin.components:
        shown = f"{component.kind} {component.name}"
        yield shown, "description", partial(check_summary, component)
        if isinstance(component, Recipe):
            yield shown, "assembles", partial(_assembled, component.name)
            continue
        yield shown, "code", partial(check_references, component)
        # The name of a record format selects nothing without a dataset that has records.
        if component.keys and not isinstance(component, RecordFormat):
            selected = selecting(type(component), component.name)
            if isinstance(component, Model):
                selected |= {"model.flavor": next(iter(component.flavors)), "model.args": args or inline({})}
            yield from _jobs_of(shown, component, {**selected, **settings}, jobs, reader)
    if settings and any(isinstance(one, Transform | Observer) for one in plugin.components):
        on = {**SMALL, **settings}
        yield where, f"a job with {', '.join(settings)}", partial(jobs.same, dict(SMALL), on, ranks, plugin)


def _assembled(recipe: str) -> str:
    job = load_job(recipe, (), Components.from_installed(), None, missing_ok=True)
    return f"{job.model_name} on {job.mesh.world_size} ranks, {len(job.transforms)} transforms"


def _jobs_of(shown: str, component: Component, settings: dict[str, object], jobs: _Jobs, reader: str) -> Iterator[Check]:
    if isinstance(component, Model):
        from titan_testing.checks.model import CHECKS

        for name, check in CHECKS.items():
            yield shown, name, partial(_checked, check, settings)
    needs = PATHS.get(type(component))
    if needs is not None and needs not in settings:
        yield shown, "one device", partial(_tried_with, needs, partial(jobs.one, settings))
        return
    yield shown, "one device", partial(jobs.one, settings)
    if is_usable("titan-parallel"):
        from titan_testing.suites.base import MESHES as TABLE

        for name in MESHES if isinstance(component, Model | Objective) else MESHES[:1]:
            mesh = TABLE[name]
            yield shown, name, partial(jobs.same, settings, {**settings, **mesh.overrides}, mesh.ranks)
        if isinstance(component, Model) and is_usable("titan-experts"):
            yield shown, "EP 2", partial(jobs.experts, settings)
    if isinstance(component, Model) and component.formats and is_usable("titan-ckpt"):
        yield shown, "exported weights", partial(jobs.exported, settings)
        yield shown, "another reader", partial(jobs.read_elsewhere, settings, reader)


def _checked(check: Callable[[AssembledJob], str], settings: dict[str, object]) -> str:
    from titan_testing.jobs import make_job

    return check(make_job("tiny", settings, 1))


def _tried_with(key: str, check: Callable[[], str]) -> str:
    try:
        return check()
    except PluginFailure:
        raise
    except UserError as error:
        raise NotTried(f"{'; '.join(map(str, error.problems))}; pass --set {key}=PATH") from error


class _Jobs:
    """Trains jobs in processes that stay alive."""

    def __init__(self) -> None:
        self._records: dict[str, Any] = {}
        self._pool: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="titan-check-")

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._folder.cleanup()

    def one(self, settings: Mapping[str, object]) -> str:
        """Train on one device; return the losses."""
        record = self._train(settings, 1)
        if not all(loss == loss and abs(loss) < float("inf") for loss in record.losses):
            raise AssertionError(f"the losses are {record.losses}")
        return "losses " + ", ".join(f"{loss:.4f}" for loss in record.losses)

    def same(
        self, one: Mapping[str, object], settings: Mapping[str, object], ranks: int, plugin: Plugin | None = None
    ) -> str:
        """Compare a job with ``one`` on one device.

        Args:
            plugin: must take part in the job.
        """
        from titan_testing.jobs import make_job
        from titan_testing.meshes import NEARLY_ZERO, largest_differences, require_equal

        if plugin is not None:
            job = make_job("tiny", dict(settings), ranks)
            own = {(one.kind, one.name) for one in plugin.components}
            if not own & {(one.kind, one.name) for one in (*job.transforms, *job.observers)}:
                raise UserError.one("--set", f"switches no component of {plugin.name} on", "set what its `active` reads")
        found, expected = self._train(settings, ranks), self._train(one, 1)
        require_equal([found], expected, least=NEARLY_ZERO)
        return largest_differences(found, expected)

    def experts(self, settings: Mapping[str, object]) -> str:
        """Compare a job that divides the experts of a model with one device."""
        from titan_testing.checks.model import has_experts
        from titan_testing.jobs import make_job
        from titan_testing.meshes import EXPERT_CASES

        if not has_experts(make_job("tiny", dict(settings), 1)):
            return "no experts"
        return self.same(settings, {**settings, **EXPERT_CASES[0].overrides}, EXPERT_CASES[0].ranks)

    def exported(self, settings: Mapping[str, object]) -> str:
        """Export the weights of a run, and read them again."""
        from titan_testing.checks.formats import LARGE_UPDATES, check_exported, exported_format
        from titan_testing.jobs import make_job

        if exported_format(make_job("tiny", dict(settings), 1).family) is None:
            return "no format can be written"
        run, exported = self._folders(settings)
        self._train({**settings, **LARGE_UPDATES, "job.dump_folder": str(run)}, 1)
        return check_exported("tiny", settings, run, exported)

    def read_elsewhere(self, settings: Mapping[str, object], reader: str) -> str:
        """Read the weights that :meth:`exported` has written with another reader."""
        from titan_testing.checks.formats import Reader, check_read_elsewhere, read_by_transformers

        run, exported = self._folders(settings)
        if not exported.exists():
            raise NotTried("no weights are exported")
        read = Ref[Reader](reader).load() if reader else read_by_transformers
        try:
            return check_read_elsewhere("tiny", settings, run, exported, read)
        except NotTried as error:
            raise NotTried(f"{error}; pass --reader MODULE:FUNCTION") from error

    def _folders(self, settings: Mapping[str, object]) -> tuple[Path, Path]:
        folder = Path(self._folder.name) / str(settings["model.name"])
        return folder / "run", folder / "exported"

    def _train(self, settings: Mapping[str, object], ranks: int) -> Any:
        from titan_testing.gloo_pool import GlooPool
        from titan_testing.jobs import make_job
        from titan_testing.meshes import merged

        key = f"{ranks} {sorted(settings.items())}"
        if key not in self._records:
            make_job("tiny", dict(settings), ranks)  # whatever is wrong with it is one error here
            self._pool = self._pool or GlooPool()
            with tempfile.TemporaryDirectory(prefix="titan-check-") as folder:
                self._records[key] = merged(self._pool.run(ranks, run_quietly, folder, dict(settings)))
        return self._records[key]


def run_quietly(folder: str, settings: dict[str, object]) -> Any:
    """Train in ``folder`` without output; return the record."""
    from titan_testing.meshes import run_in

    with redirect_stdout(StringIO()):
        return run_in(folder, settings)


def _result(component: str, name: str, check: Callable[[], str]) -> Result:
    began = time.monotonic()
    passed: bool | None = True
    try:
        detail = check()
    except UserError as error:
        passed = None if all(problem.missing for problem in error.problems) else False
        detail = "; ".join(map(str, error.problems))
    except NotTried as error:
        passed, detail = None, str(error)
    except AssertionError as error:
        passed, detail = False, " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001 - the plugin's code may raise anything, and the other checks continue
        passed, detail = False, _last_line(error)
    return Result(component, name, passed, detail, round(time.monotonic() - began, 2))


def _last_line(error: Exception) -> str:
    """Return the error of a rank, whose traceback is the message of ``error``, without the name of its class."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return re.sub(r"^[\w.]+\.(UserError|PluginFailure): ", "", lines[-1]) if lines else type(error).__name__
