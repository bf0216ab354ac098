"""Components, which plugins register: small frozen descriptions with lazy references to the code that builds the thing.

A component has a name, a one-line summary, optionally a config section, and references to its code. Neither this module nor
a ``plugin.py`` may import torch; the code behind a :class:`~titan_core.api.Ref` may. Plugins do not import each other: where
one leaves values for another, the reader declares a :class:`Slot`, and the writer fills it by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from titan_core.api.config.resolved import Config
from titan_core.api.config.section import Section
from titan_core.api.plugins.job import Job, JobContext, TrainingContext
from titan_core.api.plugins.ref import Ref

if TYPE_CHECKING:
    import torch

    from titan_core.api.parallel.job_mesh import JobMesh


@dataclass(frozen=True, kw_only=True)
class Component:
    """The fields that all components share."""

    kind: ClassVar[str]
    """The name of the kind for readers: 'model', 'dataset', ..."""
    keys: ClassVar[tuple[str, ...]] = ()
    """The config keys that select a component of this kind by its name."""

    name: str
    """The name that selects the component in a config; unique among the components of its kind."""
    summary: str
    """One line for ``titan plugins``."""
    config: type[Section] | None = None
    """The class of the component's config section. Components of one plugin may share a section."""

    reads: tuple[Slot[Any], ...] = ()
    """The slots that the component reads, and other plugins fill."""

    def section_in(self, config: Config) -> Any:
        """Return the component's section in ``config``, or ``None`` if the component has none."""
        return None if self.config is None else config.section(self.config)

    def context(self, job: Job) -> JobContext[Any]:
        """Return the context with which the component's code is called while a job is assembled."""
        return JobContext(section=self.section_in(job.config), job=job)

    def training_context(self, job: Job, mesh: JobMesh, device: torch.device) -> TrainingContext[Any]:
        """Return the context with which the component's code is called once training starts."""
        return TrainingContext(section=self.section_in(job.config), job=job, mesh=mesh, device=device)


@dataclass(frozen=True, kw_only=True)
class Recipe(Component):
    """A complete config that ships with a plugin."""

    kind = "recipe"
    package: str
    """The package that contains the file, such as ``my_titan_plugin``."""
    path: str
    """Path of the file in the package: ``recipes/tiny.toml``."""
    default: bool = False
    """Whether commands use this recipe if none is named. If two installed plugins have a default, the user must choose."""

    @property
    def file(self) -> Traversable:
        """The TOML file."""
        return resources.files(self.package).joinpath(self.path)


def recipes_in(package: str, folder: str = "recipes") -> list[Recipe]:
    """Return every ``*.toml`` in ``folder`` of ``package`` as a recipe. The file's first comment line is its summary."""
    recipes = []
    for file in sorted(resources.files(package).joinpath(folder).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            first_line = file.read_text(encoding="utf-8").partition("\n")[0]
            name = file.name.removesuffix(".toml")
            recipes.append(Recipe(name=name, summary=first_line.lstrip("# "), package=package, path=f"{folder}/{file.name}"))
    return recipes


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Slot(Generic[T]):
    """A named place for values of type ``T``, one per module. Its reader declares it in :attr:`Component.reads`."""

    name: str
    """``"titan_parallel.region_casts"``: the package of the reader, and a subject."""
    summary: str
    """What a value is, in one line."""
    accepts: Ref[Callable[[object], T]] | None = None
    """Value -> the value to keep. Raises :class:`TypeError` with what it must be. Called once, when a transform has filled
    the slot; the error names that transform. ``None``: any value."""
