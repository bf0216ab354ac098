"""Launchers are plugins: `titan train` accepts their options, and names the missing package if there is none. They leave the
GPUs to their ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from harness.distributions import entry_points_in, write_distribution
from titan_core.api import RunEnd
from titan_core.cli import main as command_line
from titan_core.cli.main import main
from titan_core.loop import training
from titan_core.plugins.discovery import Discovery, Plugin, discover
from titan_core.plugins.installing import how_to_install
from titan_core.plugins.providers import index
from titan_core.plugins.registry import Components

INSTALLED = tuple(one for one in discover().plugins if one.distribution not in ("titan-harness", "titan-testing"))
"""The plugins of a user's installation, without those of tests and of authors."""
MINE = """
from titan_core.api import hookimpl
from titan_core.toolkit.launching import Launcher
from titan_core.api import Ref
api = (1, 0)

@hookimpl
def titan_launchers():
    return [Launcher(name="mine", summary="-", arguments=Ref("mine:arguments"), run=Ref("mine:run"))]

def arguments(parser):
    parser.add_argument("--islands", type=int)

def run(context, ranks):
    assert context.rank_arguments[0] == "train" and "--islands" not in context.rank_arguments and ranks.writes_run
    print(context.arguments.recipe, context.arguments.islands, ranks.assemble(2).mesh.world_size)
    return 40
"""


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", "harness,harness_parallel")
    monkeypatch.setattr(
        training, "train", lambda job, observers, **more: RunEnd(1, completed=True, reason="all steps are done")
    )


Use = Callable[[tuple[Plugin, ...]], None]
PluginsIn = Callable[[str], tuple[Plugin, ...]]
WITHOUT_LAUNCHER = tuple(one for one in INSTALLED if one.name not in ("launch", "simulate"))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that determines which plugins are installed."""

    def use(plugins: tuple[Plugin, ...]) -> None:
        registry = Components(Discovery(plugins, ()))
        monkeypatch.setattr(command_line.Components, "from_installed", lambda: registry)

    return use


@pytest.fixture
def plugins_in(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginsIn]:
    """Return a function that installs a source as the plugin ``mine``."""

    def install(source: str) -> tuple[Plugin, ...]:
        monkeypatch.syspath_prepend(write_distribution(in_tmp, "mine", source))
        return discover(entry_points_in(in_tmp)).plugins

    yield install
    sys.modules.pop("mine", None)


@pytest.mark.quick_rows(5)
@pytest.mark.parametrize("option", sorted(index()["option"]))
@pytest.mark.parametrize("form", ["{} 2", "{}=2", "{}"])
def test_options_of_a_launcher_name_the_package_to_install(
    use: Use, option: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use(WITHOUT_LAUNCHER)
    assert main(["train", *form.format(option).split(), "--training.steps", "1"]) == 2
    package = index()["option"][option]
    error = capsys.readouterr().err
    assert error == f"titan: error: {option}: is provided by {package}; {how_to_install(package)}\n"


def test_a_launcher_that_is_switched_off_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_DISABLE_PLUGINS", "launch,harness,harness_parallel")
    assert main(["train", "--nproc-per-node", "2"]) == 2
    assert "titan-launch is switched off" in capsys.readouterr().err


def test_a_plugin_can_provide_a_launcher(use: Use, plugins_in: PluginsIn, capsys: pytest.CaptureFixture[str]) -> None:
    use((*WITHOUT_LAUNCHER, *plugins_in(MINE)))
    assert main(["train", "--islands", "3"]) == 40
    assert capsys.readouterr().out == "llama3_debug 3 2\n"
    # Without its options, this process trains. Options of a missing launcher still name its package.
    assert main(["train", "--training.steps", "1"]) == 0
    assert main(["train", "--nproc-per-node", "3"]) == 2
    assert "--nproc-per-node: is provided by titan-launch; install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ('raise KeyError("x")', "arguments raised KeyError: 'x'"),
        ('parser.add_argument("--needed", required=True)', "the following arguments are required: --needed"),
        ('parser.add_argument("RECIPE")', "the following arguments are required: RECIPE"),
        ('parser.add_argument("--nnodes")', "argument --nnodes: conflicting option string"),
    ],
)
def test_a_broken_launcher_does_not_affect_jobs_that_do_not_need_it(
    broken: str, why: str, use: Use, plugins_in: PluginsIn, capsys: pytest.CaptureFixture[str]
) -> None:
    use((*INSTALLED, *plugins_in(MINE.replace('parser.add_argument("--islands", type=int)', broken))))
    assert main(["train", "--training.steps", "1"]) == 0
    error = capsys.readouterr().err
    assert "titan: warning: launcher 'mine' is ignored: " in error and why in error


def test_launchers_exclude_each_other(use: Use, plugins_in: PluginsIn, capsys: pytest.CaptureFixture[str]) -> None:
    use((*INSTALLED, *plugins_in(MINE)))
    assert main(["train", "--islands", "3", "--nproc-per-node", "2"]) == 2
    assert "uses options of several launchers: local, mine; use the options of one launcher" in capsys.readouterr().err


DEFAULTS = """
from titan_core.api import Recipe, hookimpl
api = (1, 0)

@hookimpl
def titan_recipes():
    return [Recipe(name="theirs", summary="-", package="mine", path="theirs.toml", default=True)]
"""


def test_with_two_default_recipes_the_user_must_choose(
    use: Use, plugins_in: PluginsIn, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = plugins_in(DEFAULTS)
    use(INSTALLED)
    assert main(["recipes", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out) if one["default"]] == ["llama3_debug"]
    use((*INSTALLED, *theirs))
    assert main(["config", "check"]) == 2
    assert "several plugins have a default recipe: llama3_debug, theirs; name a recipe" in capsys.readouterr().err
    assert main(["config", "check", "llama3_debug"]) == 0
    use(tuple(one for one in INSTALLED if one.name != "llama"))
    assert main(["config", "check"]) == 2
    assert "no installed plugin has a default recipe; name a recipe" in capsys.readouterr().err


def test_a_config_without_a_model_uses_the_only_installed_one(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[plugins]\ndisable = ["models-hf", "qwen3"]\n[training]\nsteps = 1\n')
    assert main(["config", "show", "my.toml"]) == 0
    assert 'name = "llama3"' in capsys.readouterr().out
    assert main(["config", "check", "my.toml", "--model.name="]) == 2
    assert "no model is selected, and none or several are installed; available: llama3, tiny" in capsys.readouterr().err


USES_CUDA = ("_lazy_init", "init", "set_device", "get_device_properties", "get_device_capability", "get_device_name")


@pytest.fixture
def guarded_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that may be counted but not used."""

    def used(*arguments: object, **keywords: object) -> None:
        raise AssertionError("the launcher uses CUDA")

    for name in USES_CUDA:
        monkeypatch.setattr(torch.cuda, name, used)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("guarded_gpus", "in_tmp")
def test_the_launcher_counts_gpus_and_creates_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        "titan_launch.launch.launch", lambda settings, options, per_node, *rest: started.append(per_node) or 0
    )
    command = ["train", "llama3_debug", "--nproc-per-node", "gpu", "--job.device", "cuda"]
    assert main([*command, "--float8.enable", "true"]) == 0  # the ranks check whether their GPU has float8
    assert started == [2]


@pytest.mark.full
@pytest.mark.usefixtures("guarded_gpus", "in_tmp")
def test_not_while_the_ranks_train_either() -> None:
    """The ranks are other processes, which see that this machine has no GPU, or use it."""
    command = ["train", "llama3_debug", "--nproc-per-node", "2", "--training.steps", "1", "--job.device", "cpu"]
    assert main([*command, "--model.args.n_layers", "1"]) == 0
