"""Loading: TOML and overrides to a resolved config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_core.api import Config, Model, Problem, Recipe, Section, StoredModel, UserError
from titan_core.api._shown import shorten, show
from titan_core.api.config.resolved import COMMAND_LINE
from titan_core.api.config.secrets import is_redacted, redact_text
from titan_core.api.config.sections import JobSection, ModelSection, PluginsSection
from titan_core.api.config.toml import LONGEST, BadToml, parse_toml
from titan_core.config.overrides import OVERRIDES, AnyOverride, TypedOverride, given_value, where_of, without_dashes
from titan_core.config.pretrained import lay_under
from titan_core.config.problems import problems_of
from titan_core.config.stages import KEY as STAGES, copied, hidden_overrides, read_stages
from titan_core.plugins.providers import provider
from titan_core.plugins.registry import KEY, Components
from titan_core.toolkit.errors import MOST_PROBLEMS, MOST_SUGGESTED, close_names, nearest, nearest_path
from titan_core.toolkit.files import read_bytes

Table = dict[str, Any]


@dataclass(frozen=True)
class RawConfig:
    """A TOML document that is not validated yet."""

    source: str
    name: str
    """Name of the recipe, or of the file without its suffix; part of the default run directory."""
    tables: Table
    overridden: frozenset[str] = frozenset()
    """Dotted keys that overrides have set before."""


def load_config(
    recipe: str | Config | RawConfig, overrides: Sequence[AnyOverride], registry: Components
) -> tuple[Config, Components]:
    """Read ``recipe`` (the name of a recipe, the path of a TOML file, a document, or a config), apply ``overrides`` and
    validate every section.

    Returns the config, and ``registry`` without the plugins that the config switches off.

    Raises:
        UserError: the config is invalid. Lists all problems at once if possible.
    """
    document = raw_of(recipe) if isinstance(recipe, Config) else recipe
    raw = read_raw(document, registry) if isinstance(document, str) else document
    registry = registry.without(_plugin_names(raw, overrides, "disable"))
    return resolve(raw, overrides, registry), registry


def _nearest_recipe(recipe: str, registry: Components) -> str:
    names = [component.name for component in registry.all(Recipe)]
    if not close_names(recipe, names) and (fix := nearest_path(recipe)).startswith("did"):
        return fix
    return f"{registry.suggest(Recipe, recipe)} (see `titan recipes`)"


def read_raw(recipe: str, registry: Components) -> RawConfig:
    """Find and parse the TOML.

    Raises:
        UserError: the recipe or file does not exist, cannot be read or is not TOML.
    """
    names = [component.name for component in registry.all(Recipe)]
    if recipe in names:
        text = registry.get(Recipe, recipe).file.read_text(encoding="utf-8")
        return RawConfig(recipe, recipe, _parse(text, recipe))
    path = Path(recipe)
    if not (recipe.endswith(".toml") or _exists(path)):
        fix = without_dashes(recipe, registry.sections()) or _nearest_recipe(recipe, registry)
        raise UserError.one(recipe, "is neither a recipe nor a file", fix)
    try:
        text = read_bytes(path, longest=LONGEST).decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise UserError.one(
            recipe, f"is not UTF-8 text ({error.reason} at byte {error.start})", "save it as UTF-8"
        ) from None
    except FileNotFoundError:
        raise UserError.one(shorten(recipe), "does not exist", nearest_path(recipe)) from None
    except (OSError, ValueError) as error:  # ValueError: not a possible file name
        reason = getattr(error, "strerror", None) or error
        raise UserError.one(shorten(recipe), f"cannot be read: {reason}", "check the path") from None
    return RawConfig(recipe, path.stem, _parse(text, recipe))


def raw_of(config: Config) -> RawConfig:
    """Return the document that ``config`` is the validated form of, with every key."""
    tables: Table = {}
    for section in config.sections.values():
        tables.setdefault(section.section, {}).update(section.model_dump())
    if config.stages:
        tables[STAGES] = [dict(stage.table) for stage in config.stages]
    return RawConfig(config.source, Path(config.source).stem, tables, config.overridden)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def _parse(text: str, source: str) -> Table:
    try:
        return parse_toml(text)
    except BadToml as error:
        lines = text.splitlines()
        if error.line is None:
            raise UserError.one(source, str(error), "follow the format of a recipe (see `titan config show`)") from None
        line = shorten(lines[error.line - 1].strip()) if error.line <= len(lines) else "end of file"
        raise UserError.one(f"{source}:{error.line}", str(error), f"fix this line: {redact_text(line)}") from None


def _plugin_names(raw: RawConfig, overrides: Sequence[AnyOverride], key: str) -> list[str]:
    """Return a list in ``[plugins]``. It is read before the other sections, because it decides which of them exist."""
    table = raw.tables.get(PluginsSection.section, {})
    names = table.get(key, []) if isinstance(table, dict) else []
    for override in overrides:
        if override.key == f"plugins.{key}":
            names = given_value(override, PluginsSection, key)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def resolve(raw: RawConfig, overrides: Sequence[AnyOverride], registry: Components) -> Config:
    """Apply ``overrides`` to ``raw`` and validate every section with the classes that own its keys.

    Raises:
        UserError: one problem per mistake.
    """
    classes = registry.sections()
    tables: Table = {name: dict(value) if isinstance(value, dict) else value for name, value in raw.tables.items()}
    missing = [name for name in _plugin_names(raw, overrides, "optional") if name in tables and name not in classes]
    notes = [f"[{name}] is omitted: no plugin in use owns this section; {_remedy(name, registry)}" for name in missing]
    for name in missing:
        del tables[name]
    for override in overrides:
        _apply(override, tables, classes)
    overridden = raw.overridden | {override.key for override in overrides}
    typed = any(isinstance(override, TypedOverride) for override in overrides)
    by = OVERRIDES if typed or raw.overridden else COMMAND_LINE
    config = Config(raw.source, {}, overridden, overridden_by=by)  # for its ``where``
    stages = tables.pop(STAGES, [])
    given = copied(tables)

    problems: list[Problem] = []
    pretrained: StoredModel | None = None
    try:
        pretrained, more = lay_under(tables, config, registry)
        notes += more
    except UserError as error:
        problems += error.problems
    for name, value in tables.items():
        if isinstance(value, list) and name in classes:
            problems.append(Problem(config.where(name, value), "must be a single table", f"write [{name}] once"))
        elif not isinstance(value, dict):
            problems.append(Problem(config.where(name, value), "is outside of any section", "move it into a [section]"))
        elif name not in classes:
            problems.append(unknown_section(config, name, registry, len(problems) < MOST_PROBLEMS))
    sections: dict[type[Section], Section] = {}
    for name, owners in classes.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            continue
        if name == JobSection.section:
            table.setdefault("dump_folder", f"outputs/{raw.name}")
        if name == ModelSection.section and len(families := [one for one in registry.all(Model) if one.default]) == 1:
            table.setdefault("name", families[0].name)
        known = [key for cls in owners for key in cls.model_fields]
        for key in table:
            problems += registry.claims(KEY, f"{name}.{key}")
            where = config.where(f"{name}.{key}", table[key])
            if key not in known:
                fix = _unknown_key(name, key, known, registry) if len(problems) < MOST_PROBLEMS else ""
                problems.append(Problem(where, "unknown key", fix))
            elif is_redacted(table[key]):
                why = "its secret was removed when this config was written"
                problems.append(Problem(where, why, f"set it again, for example with --{name}.{key} VALUE"))
        for cls in owners:
            mine = {key: value for key, value in table.items() if key in cls.model_fields}
            found = registry.origin_of(cls).call(f"section [{name}]", _validate, cls, mine)
            if isinstance(found, ValidationError):
                problems += problems_of(found, name, cls, mine, config.where)
            else:
                sections[cls] = found
    if problems:
        raise UserError(*problems)
    config = Config(raw.source, sections, overridden, tuple(notes), pretrained, by)

    def of_stage(tables: Table, overridden: frozenset[str]) -> Config:
        return replace(resolve(RawConfig(raw.source, raw.name, tables, overridden), (), registry), overridden_by=by)

    read = read_stages(stages, given, config, of_stage)
    return replace(config, stages=read, notes=(*config.notes, *hidden_overrides(read, overridden)))


def _validate(cls: type[Section], values: Table) -> Section | ValidationError:
    """Return a ValidationError, a mistake of the user's. Any other exception of a validator is a failure of its plugin."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        return error


def unknown_section(config: Config, name: str, registry: Components, suggests: bool = True) -> Problem:
    """Return the problem that no plugin owns ``[name]``: misspelt, or its plugin is missing, broken or switched off.

    Args:
        suggests: whether to look for a fix, which takes milliseconds.
    """
    where = config.where(f"[{name}]")
    if any(key.startswith(name + ".") for key in config.overridden):
        where = f"{config.overridden_by}: {'--' * (config.overridden_by == COMMAND_LINE)}{name}.*"
    why = (
        "no installed plugin owns this section"
        if provider("section", name) is None
        else "no plugin in use owns this section"
    )
    return Problem(where, why, _remedy(name, registry) if suggests else "")


def _remedy(name: str, registry: Components) -> str:
    """Return how to make a plugin own section ``name``: install its package, or correct the name."""
    package = provider("section", name)
    if package is not None:
        return registry.remedy(package)
    return nearest(name, list(registry.sections())) + registry.broken_note()


def _unknown_key(section: str, key: str, known: list[str], registry: Components) -> str:
    """Return the fix for an unknown key: misspelt, of another section, or provided by a package that is not in use."""
    package = provider("key", f"{section}.{key}")
    if package is not None:
        return registry.remedy(package)
    elsewhere = [
        f"{other}.{key}" for other, owners in registry.sections().items() if any(key in cls.model_fields for cls in owners)
    ]
    if 0 < len(elsewhere) <= MOST_SUGGESTED and not close_names(key, known):
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return nearest(key, known)


def _apply(override: AnyOverride, tables: Table, classes: Mapping[str, Sequence[type[Section]]]) -> None:
    section, *path = override.key.split(".")
    table = tables.setdefault(section, {})
    for part in path[:-1]:
        if not isinstance(table, dict):
            break
        table[part] = dict(table[part]) if isinstance(table.get(part), dict) else {}
        table = table[part]
    if not isinstance(table, dict) or not path or not all(path):
        if isinstance(override, TypedOverride):
            value, fix = override.value, 'write "section.key": value'
        else:
            value, fix = override.text, "write --section.key VALUE"
        raise UserError.one(where_of(override), f"is not the name of a key (value {show(value, override.key)})", fix)
    owners = classes.get(section, ()) if len(path) == 1 else ()
    cls = next((cls for cls in owners if path[-1] in cls.model_fields), None)
    table[path[-1]] = given_value(override, cls, path[-1])
