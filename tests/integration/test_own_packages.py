"""Titan is not on the public index, where its names belong to others or to nobody. Whatever README, the docs, CI and errors
say to run takes Titan's packages from their wheels, their folders, an index of one's own or that of ``TITAN_PACKAGE_INDEX``,
and asks no other index for them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import importlib_metadata
import pytest

from ci.bounds import floors
from ci.isolated import build, build_wheels, requirements_of
from ci.rehearse import required, write_index
from ci.workspace import CORE, ROOT, declared, distributions, packages
from harness.package_index import PackageIndex, package_index
from titan_core.plugins import installing
from titan_core.plugins.installing import INDEX, how_to_install

pytestmark = pytest.mark.wheels

MODEL = "titan-models-llama"
THEIRS = ((0, 6, 0), (0, 11, 1))
"""Versions of Snowflake's titan-core on the public index. An installer that merges indexes could take one of these for ours,
and a report of ours for theirs."""
HOSTILE = ["0.1.99", "0.11.1", "99.0"]
THIRD_PARTIES = {
    name: [max(versions, key=lambda one: [*map(int, one.split("."))])]
    for name, versions in floors(declared(list(packages().values()))).items()
    if name not in packages()
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone") / "dist"
    build_wheels([packages()[name] for name in (CORE, "titan-nn", MODEL, "titan-float8")], folder)
    return folder


@pytest.fixture
def public(tmp_path: Path) -> Iterator[PackageIndex]:
    """The public index: it has what Titan depends on, and strangers' packages with Titan's names."""
    folder = tmp_path / "public"
    folder.mkdir()
    with package_index(folder, {**THIRD_PARTIES, **dict.fromkeys(packages(), HOSTILE)}) as index:
        yield index


Shell = Callable[..., None]


@pytest.fixture
def shell(public: PackageIndex, tmp_path: Path) -> Shell:
    """Run a command in a fresh environment on a machine that knows the public index."""
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "UV_CACHE_DIR", "XDG_CACHE_HOME") if name in os.environ}
    environment = {**kept, "VIRTUAL_ENV": str(tmp_path / "venv"), "UV_DEFAULT_INDEX": public.url, "UV_NO_CONFIG": "1"}

    def run(command: str, folder: Path = tmp_path, **variables: str) -> None:
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environment | variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    return run


def installed(environment: Path) -> dict[str, str]:
    (site,) = environment.glob("lib/python*/site-packages")
    found = importlib_metadata.distributions(path=[str(site)])
    return {one.name: one.version for one in found if one.name.startswith("titan")}


def titan_names(index: PackageIndex) -> set[str]:
    return {name for name in index.asked if name.startswith("titan")}


def test_the_commands_to_install_take_wheels_alone(shell: Shell, public: PackageIndex, wheels: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"(?m)^uv pip install .*titan_core-.*$", page)
    shell(command, wheels.parent)
    assert "torch" in public.asked
    assert titan_names(public) == set()
    versions = {name: packages()[name].project["version"] for name in (CORE, "titan-nn", MODEL)}
    assert installed(tmp_path / "venv") == versions


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The index that `python -m ci.rehearse --out` writes, of `titan-llm` and what it requires without an extra."""
    out = tmp_path_factory.mktemp("own") / "dist"
    return write_index(build(required(""), out), out).as_uri()


def commands_for_an_index() -> list[str]:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    commands = re.findall(r"(?m)^(uv pip install .*--index .*?) *(?:#.*)?$", page)
    return list(dict.fromkeys(command.replace("[all]", "") for command in commands))


def test_an_index_of_ones_own_and_the_public_one(shell: Shell, public: PackageIndex, own: str, tmp_path: Path) -> None:
    whole, _ = commands_for_an_index()
    shell(whole, INDEX=own)
    assert installed(tmp_path / "venv") == {one.name: one.project["version"] for one in required("")}
    assert "torch" in public.asked
    assert titan_names(public) == set()


def test_the_cpu_build_without_a_clone(shell: Shell, public: PackageIndex, own: str, tmp_path: Path) -> None:
    """uv takes torch, and nothing of Titan's, from the index that it knows for CPU builds. Here a proxy answers for it."""
    _, without_gpu = commands_for_an_index()
    folder = tmp_path / "pytorch"
    folder.mkdir()
    with package_index(folder, {"torch": ["2.15.0+cpu", "2.12.0+cpu"]}) as pytorch:
        shell(
            without_gpu,
            INDEX=own,
            HTTPS_PROXY=pytorch.url.removesuffix("/simple"),
            SSL_CERT_FILE=str(folder / "authority.pem"),
            UV_CACHE_DIR=str(tmp_path / "cache"),  # not the user's: it would keep this torch as that of the index
        )
        assert set(pytorch.asked) == {"torch"} and len(set(pytorch.hosts)) == 1
    assert "torch" not in public.asked and titan_names(public) == set()
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert (site / "torch-2.15.0+cpu.dist-info").is_dir()


class Recorded(importlib_metadata.PathDistribution):
    """titan-core, as an installer records the place that it came from."""

    def __init__(self, folder: Path, source: Path, **details: object) -> None:
        folder.mkdir()
        (folder / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), **details}))
        super().__init__(folder)


def command_in(hint: str) -> str:
    (command,) = re.findall(r"`(.*)`", hint)
    return str(command)


def test_an_error_names_the_wheel_beside_that_of_titan_core(
    shell: Shell, public: PackageIndex, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (core,) = wheels.glob("titan_core-*.whl")
    recorded = Recorded(tmp_path / "info", core, archive_info={})
    monkeypatch.setattr(installing, "ours", lambda: recorded)
    shell(command_in(how_to_install("titan-float8")))
    assert "torchao" in public.asked
    assert titan_names(public) == set()
    assert installed(tmp_path / "venv").keys() == {CORE, "titan-nn", "titan-float8"}
    assert "install the wheel of titan-parallel from where" in how_to_install("titan-parallel")  # it was not built


@pytest.mark.full
def test_an_error_names_the_folder_in_a_workspace(
    shell: Shell, public: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path / "info", packages()[CORE].folder, dir_info={"editable": True})
    monkeypatch.setattr(installing, "ours", lambda: recorded)
    shell(f"{command_in(how_to_install('titan-float8'))} --dry-run")  # the compiler of editable packages is on no index here
    assert "torchao" in public.asked
    assert titan_names(public) == set()


def test_an_error_names_the_index_of_the_setting(
    shell: Shell, public: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "company"
    folder.mkdir()
    with package_index(folder, {CORE: ["0.1.0"], "titan-float8": ["0.1.0"]}) as company:
        for url in (company.url, company.url.replace("://", "://someone:geheim@")):
            monkeypatch.setenv(INDEX, url)
            hint = how_to_install("titan-float8")
            assert "geheim" not in hint
            shell(command_in(hint), **{INDEX: url})
            assert installed(tmp_path / "venv") == {"titan-float8": "0.1.0"}
            shell("uv pip uninstall titan-float8")
        assert public.asked == []
        assert set(company.asked) == {"titan-float8"}


@pytest.mark.full
def test_packages_of_our_ci_come_from_wheels(shell: Shell, public: PackageIndex, tmp_path: Path) -> None:
    needed = requirements_of([packages()["titan-float8"]], tmp_path / "wheels")
    shell(f"uv pip install --dry-run {shlex.join(needed)}")
    assert "torchao" in public.asked
    assert titan_names(public) == set()


@pytest.mark.full
def test_an_example_is_installed_without_looking_up_titan(shell: Shell, public: PackageIndex) -> None:
    (command,) = re.findall(r"(?m)^uv pip install .*$", (ROOT / "examples/titan-model-tinygpt/README.md").read_text())
    shell(f"{command} --dry-run", ROOT)
    assert public.asked == []


def test_other_commands_would_ask_the_index(shell: Shell, public: PackageIndex, wheels: Path, tmp_path: Path) -> None:
    shell("uv pip install titan-float8")
    assert installed(tmp_path / "venv") == {"titan-float8": "99.0"}
    shell("uv pip install dist/titan_float8-*.whl", wheels.parent)
    assert titan_names(public) == {CORE, "titan-nn", "titan-float8"}
    assert installed(tmp_path / "venv")[CORE] == "0.1.99", "the stranger's"


INSTALL = re.compile(r"pip install([^`\n]*)")


def test_no_text_says_to_install_titan_by_name() -> None:
    sources = [*ROOT.glob("packages/*/src/**/*"), *ROOT.glob("ci/*"), *ROOT.glob("benchmarks/**/*.sh"), ROOT / ".ci/run"]
    seen = 0
    for file in [*PAGES, *(one for one in sources if one.suffix in (".py", ".sh", ".toml", "") and one.is_file())]:
        for arguments in INSTALL.findall(file.read_text(encoding="utf-8")):
            words = [word.strip("'\"();,") for word in arguments.split()]
            by_name = [word for word in words if word.partition("[")[0] in distributions() and "--index" not in words]
            folders = [word for word in words if word.startswith(".")]
            seen += 1
            assert not by_name, f"{file}: pip install{arguments}"
            assert not folders or "--no-deps" in words, f"{file}: pip install{arguments} looks up its dependency {CORE}"
    assert seen > 10


def test_the_lock_takes_titan_from_the_workspace() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    sources = {one["name"]: one["source"] for one in lock["package"] if one["name"].startswith("titan")}
    assert sources.keys() == {*distributions()}
    assert {name for name, source in sources.items() if source.keys().isdisjoint({"editable", "virtual"})} == set()


def test_versions_of_titan_core_are_not_those_of_the_other_project() -> None:
    version = packages()[CORE].project["version"]
    assert not THEIRS[0] <= tuple(map(int, version.split("."))) <= THEIRS[1], "skip these versions"
    for package in distributions().values():
        requirement = package.requires(CORE)
        if requirement is not None:
            (upper,) = re.findall(r"<([\d.]+)", requirement)
            (lower,) = re.findall(r">=([\d.]+)", requirement)
            limits = tuple(map(int, upper.split("."))), tuple(map(int, lower.split(".")))
            assert limits[0] <= THEIRS[0] or limits[1] > THEIRS[1], (
                f"{package.name} allows the other project's: {requirement}"
            )
