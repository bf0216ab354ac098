"""Discovery: loads each entry point of group ``titan.plugins`` separately, so that a broken plugin affects no other."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import importlib_metadata
import pluggy

from titan_core.api import (
    API_VERSION,
    Checkpoint,
    Command,
    Component,
    Dataset,
    HealthCheck,
    LRSchedule,
    MeshDim,
    MeshView,
    Model,
    ModelHub,
    Objective,
    Observer,
    Optimizer,
    Problem,
    Recipe,
    RecordFormat,
    Tokenizer,
    Transform,
    UserError,
    hookspecs,
)
from titan_core.api.config.sections import CORE_SECTIONS
from titan_core.plugins.component_checks import PluginError, components_from, with_origin
from titan_core.plugins.guard import Origin
from titan_core.toolkit.errors import nearest
from titan_core.toolkit.hookspecs import hook_manager
from titan_core.toolkit.launching import Launcher
from titan_core.toolkit.plugin_files import PluginFile, load_plugin_files

log = logging.getLogger(__name__)

GROUP = "titan.plugins"
CORE = "core"
"""Name of the core's own plugin, which cannot be switched off."""
DISABLE_VARIABLE = "TITAN_DISABLE_PLUGINS"
SLOW_SECONDS = 5.0
"""Time after which a plugin that is still loading is named."""
_SHOWN = len("sha256:") + 12
"""Length of a version in errors. That of a plugin file is the hash of the file."""

REGISTRATION_HOOKS: dict[str, type[Component]] = {
    "titan_models": Model,
    "titan_parallelisms": Transform,
    "titan_precisions": Transform,
    "titan_checkpoints": Checkpoint,
    "titan_debuggers": Observer,
    "titan_datasets": Dataset,
    "titan_formats": RecordFormat,
    "titan_tokenizers": Tokenizer,
    "titan_model_hubs": ModelHub,
    "titan_optimizers": Optimizer,
    "titan_objectives": Objective,
    "titan_lr_schedules": LRSchedule,
    "titan_metric_loggers": Observer,
    "titan_recipes": Recipe,
    "titan_commands": Command,
    "titan_launchers": Launcher,
    "titan_health_checks": HealthCheck,
}


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin of an installed distribution."""

    name: str
    """Name of its entry point."""
    distribution: str
    version: str


@dataclass(frozen=True)
class Plugin(InstalledPlugin):
    """A usable plugin."""

    module: ModuleType
    components: tuple[Component, ...]

    @property
    def origin(self) -> Origin:
        """The origin that errors in calls into this plugin report."""
        return Origin(self.name, self.distribution, self.version[:_SHOWN], removable=self.name != CORE)


@dataclass(frozen=True)
class BrokenPlugin(InstalledPlugin):
    """A plugin that cannot be used, with the reason."""

    reason: str


@dataclass(frozen=True)
class Discovery:
    """The result of discovery."""

    plugins: tuple[Plugin, ...]
    broken: tuple[BrokenPlugin, ...]
    disabled: tuple[InstalledPlugin, ...] = ()
    """Plugins that are switched off."""


def discover(entry_points: Iterable[importlib_metadata.EntryPoint] | None = None) -> Discovery:
    """Load all installed plugins (or ``entry_points``) and the plugin files of the command line, except those that
    ``TITAN_DISABLE_PLUGINS`` names.

    Raises:
        UserError: a plugin file cannot be used, or ``TITAN_DISABLE_PLUGINS`` contains a name that no plugin has.
    """
    everything = entry_points is None
    if entry_points is None:
        entry_points = importlib_metadata.entry_points(group=GROUP)
    switched_off = {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()}
    plugins: list[Plugin] = []
    broken: list[BrokenPlugin] = []
    disabled: list[InstalledPlugin] = []
    seen: set[tuple[str, str, str]] = set()
    manager = hook_manager()
    # The core comes first, so that its commands head the help. The others are sorted by name: file systems have no order.
    for entry_point in sorted(entry_points, key=lambda point: (point.name != CORE, point.name, point.value)):
        distribution, version = _distribution_of(entry_point)
        if (entry_point.name, entry_point.value, distribution) in seen:
            continue  # a distribution found twice on sys.path, such as an editable install run from its own folder
        seen.add((entry_point.name, entry_point.value, distribution))
        if entry_point.name in switched_off and entry_point.name != CORE:
            disabled.append(InstalledPlugin(entry_point.name, distribution, version))
            continue
        try:
            with _named_if_slow(f"plugin {entry_point.name!r} ({distribution} {version})", entry_point):
                module = _import(entry_point)
                components = components_of(module, manager)
            plugin = Plugin(entry_point.name, distribution, version, module, components)
            plugins.append(
                replace(plugin, components=tuple(with_origin(component, plugin.origin) for component in plugin.components))
            )
        except PluginError as error:
            broken.append(BrokenPlugin(entry_point.name, distribution, version, str(error)))
    for file, module in load_plugin_files():
        plugin = _from_file(file, module, manager)
        if plugin.name in switched_off:
            disabled.append(InstalledPlugin(plugin.name, plugin.distribution, plugin.version))
        else:
            plugins.append(plugin)
    if everything:
        _require_known(switched_off, [plugin.name for plugin in (*plugins, *broken, *disabled)])
    return Discovery(tuple(plugins), tuple(broken), tuple(disabled))


@contextmanager
def _named_if_slow(plugin: str, entry_point: importlib_metadata.EntryPoint) -> Iterator[None]:
    """Log one line if the block, which loads ``plugin``, takes longer than :data:`SLOW_SECONDS`: an import that hangs
    would be silent otherwise."""
    if entry_point.module in sys.modules:  # it has been loaded before, and did not hang
        yield
        return
    fix = "" if entry_point.name == CORE else f"; {DISABLE_VARIABLE}={entry_point.name} leaves it out"
    line = f"titan: {plugin} is still loading after {SLOW_SECONDS:g} s{fix}"
    timer = threading.Timer(SLOW_SECONDS, lambda: log.warning("%s", line))  # on stderr unless a program has set up logging
    timer.daemon = True  # if the process is interrupted meanwhile
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _require_known(switched_off: Iterable[str], names: list[str]) -> None:
    """
    Raises:
        UserError: ``TITAN_DISABLE_PLUGINS`` contains a name that no plugin has: a misspelt one would stay on.
    """
    if unknown := [name for name in sorted(switched_off) if name not in names]:
        where = f"environment: {DISABLE_VARIABLE}"
        raise UserError(*(Problem(where, f"no plugin is named {name!r}", nearest(name, names)) for name in unknown))


def _from_file(file: PluginFile, module: ModuleType, manager: pluggy.PluginManager) -> Plugin:
    """Return the plugin in ``file``.

    Raises:
        UserError: it breaks the contract, or has no hooks. The user asked for this file, so the command cannot do without.
    """
    try:
        components = components_of(module, manager)
    except PluginError as error:
        raise UserError.one(file.where, str(error), "fix the file") from error
    if not components and not any(hasattr(value, f"{hookspecs.PROJECT}_impl") for value in vars(module).values()):
        why = "has no hooks, so it would do nothing"
        fix = "define one, such as titan_formats, with @hookimpl (python -m pydoc titan_core.api.hookspecs lists them)"
        raise UserError.one(file.where, why, fix)
    plugin = Plugin(file.name, file.path.name, f"sha256:{file.sha256}", module, components)
    return replace(plugin, components=tuple(with_origin(component, plugin.origin) for component in components))


def _distribution_of(entry_point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    """Return name and version. ``metadata`` is read once, because each access parses the whole file again."""
    try:
        metadata = entry_point.dist.metadata if entry_point.dist is not None else None
    except importlib_metadata.MetadataNotFound:
        metadata = None
    return (metadata["Name"], metadata["Version"]) if metadata is not None else ("?", "?")


def _import(entry_point: importlib_metadata.EntryPoint) -> ModuleType:
    try:
        module = entry_point.load()
    except (Exception, SystemExit) as error:
        # Third-party imports may raise anything; the error becomes the reason that `titan plugins` shows.
        raise PluginError(f"importing {entry_point.value!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(module, ModuleType):
        raise PluginError(f"its entry point {entry_point.value!r} is not a module")
    return module


def components_of(module: ModuleType, manager: pluggy.PluginManager) -> tuple[Component, ...]:
    """Check a plugin module against the contract and return the components that it registers.

    Args:
        manager: knows the hooks. No plugin is registered with it before and after: errors and components belong to this
            plugin alone.

    Raises:
        PluginError: it needs another contract version, a hook is misspelt or has a wrong signature, or a hook failed.
    """
    _check_api(module)
    for name, value in vars(module).items():
        if name.startswith("titan_") and inspect.isfunction(value) and not hasattr(value, f"{hookspecs.PROJECT}_impl"):
            raise PluginError(f"function {name} is not marked with @hookimpl, so it would never be called")
    try:
        manager.register(module)
        manager.check_pending()
        components = list(_registered(manager))
    except pluggy.PluginValidationError as error:
        raise PluginError(" ".join(str(error).split())) from error
    finally:
        if manager.is_registered(module):
            manager.unregister(module)
    _check_keys(components)
    return tuple(components)


def _registered(manager: pluggy.PluginManager) -> Iterator[Component]:
    """Yield the components of the only plugin of ``manager``.

    Raises:
        PluginError: a hook fails, or returns something else.
    """
    for hook, kind in REGISTRATION_HOOKS.items():
        # Not called through pluggy, which drops a None. A module has at most one implementation of a hook.
        for implementation in getattr(manager.hook, hook).get_hookimpls():
            if implementation.wrapper or implementation.hookwrapper:
                raise PluginError(f"hook {hook} is a wrapper; registration hooks have nothing to wrap")
            try:
                yield from components_from(hook, kind, implementation.function())
            except PluginError:
                raise
            except (Exception, SystemExit) as error:
                raise PluginError(f"hook {hook} raised {type(error).__name__}: {error}") from error


def _check_keys(components: Sequence[Component]) -> None:
    """Check that no section of a plugin has a key of the core, which every job uses, and that the degrees of its mesh
    dimensions are keys of the core or of its own.

    Raises:
        PluginError: otherwise.
    """
    keys = {f"{cls.section}.{key}" for cls in CORE_SECTIONS for key in cls.model_fields}
    own = {component.config: None for component in components if component.config not in (None, *CORE_SECTIONS)}
    for section in own:
        assert section is not None
        mine = {f"{section.section}.{key}" for key in section.model_fields}
        if taken := sorted(mine & keys):
            raise PluginError(f"its {section.__name__} claims {taken[0]}, which is a config key of titan-core")
        keys |= mine
    transforms = [component for component in components if isinstance(component, Transform)]
    dims: list[MeshDim | MeshView] = [one for transform in transforms for one in transform.mesh.dims]
    views = [one for transform in transforms for one in transform.mesh.views]
    for one in [*dims, *views]:
        if one.degree_key not in keys:
            raise PluginError(f"mesh dimension {one.name!r} has the degree {one.degree_key!r}, which is no config key")
        whole = one.whole_positions_key if isinstance(one, MeshDim) else None
        if whole is not None and whole not in keys:
            raise PluginError(f"mesh dimension {one.name!r} has whole_positions_key {whole!r}, which is no config key")


def _check_api(module: ModuleType) -> None:
    major, minor = API_VERSION
    api = getattr(module, "api", None)
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(number, int) for number in api)):
        raise PluginError(f"it declares no contract version: plugin.py needs a line such as 'api = ({major}, {minor})'")
    if api[0] != major or api[1] > minor:
        raise PluginError(f"it needs contract version {api[0]}.{api[1]}, but this titan-core provides {major}.{minor}")
