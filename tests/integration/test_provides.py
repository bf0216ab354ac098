"""An error about something missing names the package that provides it, from an index generated from the plugins."""

from __future__ import annotations

from pathlib import Path

import importlib_metadata
import pytest

from ci import provides
from ci.workspace import packages
from titan_core.api import Component, Dataset, LRSchedule, Model, Objective, Optimizer, Recipe, Tokenizer, UserError
from titan_core.api.config.resolved import Override
from titan_core.cli.main import main
from titan_core.config.load import load_config
from titan_core.job.assemble import assemble
from titan_core.plugins.providers import INDEX
from titan_core.plugins.registry import Components

KINDS: dict[str, type[Component]] = {
    cls.kind: cls for cls in (Dataset, LRSchedule, Model, Objective, Optimizer, Recipe, Tokenizer)
}


def test_the_index_is_up_to_date_and_installed() -> None:
    stale = "`uv run python -m ci.provides` writes it"
    assert provides.FILE.read_text() == provides.render(), stale
    assert importlib_metadata.distribution(provides.HOLDER).read_text(INDEX) == provides.render(), "`uv sync` installs it"


def message_about(kind: str, name: str, registry: Components, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error that a user sees who names ``name``."""
    if kind == "command":
        assert main(name.split()) == 2
        return capsys.readouterr().err
    if kind == "option":
        assert main(["train", "tiny", name, "2"]) == 2
        return capsys.readouterr().err
    if kind in KINDS:
        return registry.suggest(KINDS[kind], name)
    if kind == "section":
        Path("my.toml").write_text(f"[{name}]\n")
    else:
        section, key = name.split(".")
        Path("my.toml").write_text(f"[{section}]\n{key} = 2\n")
    with pytest.raises(UserError) as caught:
        load_config("my.toml", [], registry)
    return str(caught.value)


PROVIDERS = sorted({package for names in provides.provided().values() for package in names.values()})


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("package", PROVIDERS)
def test_errors_about_a_missing_package_name_it(
    package: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next test covers keys of the core that a package serves."""
    whole = Components.from_installed()
    mine = [plugin for plugin in whole.found.plugins if plugin.distribution == package]
    everything = {pair for plugin in mine for pair in provides.provided_by(plugin)}
    assert everything
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", ",".join(packages()[package].plugins))
    without = Components.from_installed()
    cores = {f"{name}.{key}" for name, owners in without.sections().items() for cls in owners for key in cls.model_fields}
    for kind, name in everything:
        if name not in cores:
            assert f"{package} is switched off" in message_about(kind, name, without, capsys), (kind, name)


def test_an_unserved_key_of_the_core_names_the_package() -> None:
    config = [Override("training.enable_cpu_offload", "true")]
    loaded, registry = load_config("tiny", config, Components.from_installed().without(["parallel"]))
    with pytest.raises(UserError, match=r"enable_cpu_offload = true: no plugin in use provides it; titan-parallel is swit"):
        assemble(loaded, registry, 1)
