"""torch.compile, block by block: one graph serves all blocks of a kind, so compilation takes the time of one block.

The compiler's results are kept in the run's directory, so that a restarted run, on any machine, compiles nothing that an
earlier attempt has compiled. A file holds what :func:`torch.compiler.save_cache_artifacts` returns: generated code. It is a
cache, so a file that cannot be used is reported and ignored, and the code compiled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_core.api import (
    Batch,
    ModelPart,
    ObjectiveFunction,
    Run,
    StepReport,
    TrainingContext,
    UserError,
    ValidationReport,
    Vocabulary,
    World,
    hookimpl,
)
from titan_core.toolkit.device import device_name
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.files import open_file
from titan_parallel.config import ActivationCheckpointSection, CompileSection
from titan_parallel.fsdp import gathered_within_blocks, on_views
from titan_parallel.slots import COMPILER_OPTIONS
from titan_parallel.torch_private import set_activation_memory_budget

log = logging.getLogger(__name__)


def apply(part: ModelPart, context: TrainingContext[CompileSection]) -> ModelPart:
    """Compile each block in place, without renaming it, and the loss.

    Raises:
        UserError: torch and its installed backends know no ``compile.backend`` of this name.
    """
    section = context.section
    known = torch.compiler.list_backends(None)
    if section.backend not in known:
        raise UserError(
            context.config.problem("compile.backend", "torch has no such backend", nearest(section.backend, known))
        )
    recompute = context.job.section(ActivationCheckpointSection)
    # A process-wide setting that is read when a block is compiled. Always set it, to reset that of an earlier job.
    budget = recompute.memory_budget if recompute.mode == "memory_budget" else 1.0
    set_activation_memory_budget(budget)
    if "model" in section.components:
        fullgraph = _is_one_graph(part, context)
        for name, block in part.blocks().items():
            options = _options(part, name) if section.backend == "inductor" else None
            block.compile(backend=section.backend, fullgraph=fullgraph, options=options)
    if "loss" in section.components:
        part.wrap_objective(lambda objective: CompiledObjective(objective, section.backend))
    return part


def _is_one_graph(part: ModelPart, context: TrainingContext[CompileSection]) -> bool:
    """Return whether a graph break in a block is an error; log why not, if nothing else is set.

    Raises:
        UserError: it is set, and blocks are interrupted.
    """
    wanted = context.section.fullgraph
    why = []
    if counted := [*part.statistics, *part.auxiliary_losses]:
        why.append(f"modules count or add losses ({', '.join(counted)})")
    if units := gathered_within_blocks(part, context):
        why.append(f"data parallelism gathers modules within a block ({units[0]}{', ...' if len(units) > 1 else ''})")
    if wanted and why:
        fix = "remove the key"
        raise UserError(context.config.problem("compile.fullgraph", f"{' and '.join(why)}, which interrupts its graph", fix))
    if wanted is not None:
        return wanted
    if why:
        log.info("compiled blocks are interrupted: %s", " and ".join(why))
    # Ranks that divide a module otherwise, such as experts, exchange what it computes, for which the host may wait.
    return not why and not on_views(part, context.mesh)


def _options(part: ModelPart, block: str) -> dict[str, Any] | None:
    """Return the options for ``block``. Blocks with the same options share a compilation."""
    options: dict[str, Any] = {}
    for name, wanted in part.entries(COMPILER_OPTIONS).items():
        if name == block or name.startswith(f"{block}."):
            options.update(wanted)
    return options or None


class CompiledObjective(ObjectiveFunction):
    """A compiled objective."""

    def __init__(self, objective: ObjectiveFunction, backend: str) -> None:
        self.vocabulary_sharded, self.per_position = objective.vocabulary_sharded, objective.per_position
        self._compiled = torch.compile(objective.__call__, backend=backend)

    def __call__(self, logits: Tensor, batch: Batch, vocabulary: Vocabulary) -> Tensor:
        """See :class:`~titan_core.api.ObjectiveFunction`."""
        loss: Tensor = self._compiled(logits, batch, vocabulary)
        return loss


FOLDER = "compile_cache"
"""Folder in the run's directory."""

_LONGEST_HEADER = 4096


class UnusableCache(Exception):
    """A file that is not loaded. The message says why."""


def observe(parts: Sequence[ModelPart], context: TrainingContext[CompileSection]) -> object:
    """Return the observer that loads and saves the cache; one that does nothing unless the config requests it."""
    section = context.section
    return CompileCache() if section.cache and section.backend == "inductor" else object()


class CompileCache:
    """Loads the compiler's results before the first step, and saves new ones after it and after the first validation.

    Compiled code names its device, and a pipeline's stages have code of their own. Ranks that agree in both share a file,
    which the first of them writes.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._device = ""
        self._writes = False
        self._is_due = True
        self._has_validated = False
        self._known: set[tuple[str, str]] = set()

    @hookimpl
    def titan_train_start(self, run: Run) -> None:
        """Load the file, if there is one."""
        name = _name(run.world)
        self._writes = run.world.gather(name).index(name) == run.world.rank
        self._path, self._device = Path(run.dump_folder) / FOLDER / name, device_name(run.world.device)
        try:
            artifacts = read(self._path, self._device)
            info = load_artifacts(artifacts)
        except FileNotFoundError:
            return
        except (UnusableCache, OSError) as error:
            log.warning("%s is not used, so everything is compiled again: %s", self._path, error)
            return
        self._known = _keys(info)
        log.info("loaded %.1f MiB of compiled code from %s", len(artifacts) / 2**20, self._path)

    @hookimpl
    def titan_step_end(self, report: StepReport) -> None:
        """Save what is new."""
        if self._is_due:
            self._is_due = False
            self._save()

    @hookimpl
    def titan_validation_end(self, report: ValidationReport) -> None:
        """Save the code of the first evaluation after the next step."""
        self._is_due = self._is_due or not self._has_validated
        self._has_validated = True

    def _save(self) -> None:
        if not self._writes or self._path is None:
            return
        saved = torch.compiler.save_cache_artifacts()
        if saved is None or _keys(saved[1]) <= self._known:
            return
        self._known |= _keys(saved[1])
        try:
            write(self._path, self._device, saved[0])
        except OSError as error:
            log.warning("compiled code cannot be saved in %s: %s", self._path, error.strerror or error)


def _name(world: World) -> str:
    """Return the name of this rank's file. Ranks that compile the same code have the same name."""
    stages = [dim.name for dim in world.plan.dims if dim.divides == "layers" and world.plan.degrees[dim.name] > 1]
    places = [f"{name}{world.coordinate(name)}" for name in stages]
    return "-".join([*places, f"{world.device.type}{world.device.index or 0}"]) + ".bin"


def _keys(info: Any) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


def load_artifacts(artifacts: bytes) -> Any:
    """Make the compiler use ``artifacts``, and return torch's description of them.

    Raises:
        UnusableCache: torch cannot read them.
    """
    try:
        info = torch.compiler.load_cache_artifacts(artifacts)
    except Exception as error:  # torch's caches raise any type, and none of it should end a run
        raise UnusableCache(f"torch cannot load it ({type(error).__name__}: {error})") from error
    if info is None:
        raise UnusableCache("torch cannot load it")
    return info


def write(path: Path, device: str, artifacts: bytes) -> None:
    """Write ``artifacts`` to ``path``, which then is the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    header = {**_about(device), "sha256": hashlib.sha256(artifacts).hexdigest()}
    part.unlink(missing_ok=True)
    try:
        # For this user only: anyone who can change the file can run code in this job.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + artifacts)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read(path: Path, device: str) -> bytes:
    """Return the artifacts in ``path``.

    Raises:
        FileNotFoundError: there is none.
        UnusableCache: the file is damaged, from another version of torch or another device, or others may have written it.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UnusableCache("another user may have written it, and it contains code")
        try:
            header = json.loads(file.readline(_LONGEST_HEADER))
        except ValueError:
            header = None
        artifacts = file.read()
    if not isinstance(header, dict):
        raise UnusableCache("it is damaged")
    for key, value in _about(device).items():
        if header.get(key) != value:
            raise UnusableCache(f"it was compiled with {key} = {header.get(key)}, and this is {value}")
    if header.get("sha256") != hashlib.sha256(artifacts).hexdigest():
        raise UnusableCache("it is damaged")
    return artifacts


def _about(device: str) -> dict[str, str]:
    return {"torch": torch.__version__, "device": device}
