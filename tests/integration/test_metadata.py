"""What an index shows of each distribution, and what its sdist and its wheel have."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from pathlib import Path
from posixpath import normpath
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement
from twine.commands.check import check

from ci.isolated import build, build_wheels
from ci.rehearse import differing
from ci.workspace import META, ROOT, Package, distributions, packages

REPOSITORY = distributions()[META].project["urls"]["Repository"]
LICENSE = (ROOT / "LICENSE").read_bytes()
EACH = pytest.mark.parametrize("package", distributions().values(), ids=lambda one: one.name)
COMMON = ("authors", "license", "license-files", "requires-python", "urls", "dynamic")


@EACH
def test_what_all_packages_say_alike(package: Package) -> None:
    project, text = package.project, (package.folder / "pyproject.toml").read_text(encoding="utf-8")
    meta = distributions()[META].project
    assert {key: project.get(key) for key in COMMON} == {key: meta[key] for key in COMMON}
    assert set(project["classifiers"]) - {"Typing :: Typed"} == set(meta["classifiers"])
    assert project["keywords"][:3] == meta["keywords"][:3] and len(project["keywords"]) > 3
    assert set(re.findall(r"https://(?:[^\s\"/]+/){2}[^\s\"/]+", text)) == {REPOSITORY}, f"set in [project.urls] of {META}"
    assert (package.folder / "LICENSE").read_bytes() == LICENSE


def test_the_meta_distribution_requires_every_package() -> None:
    project = distributions()[META].project
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == extras.keys() - {"all"}
    named = [Requirement(one).name for one in distributions()[META].requirements]
    assert sorted(named) == sorted([META, *packages()]), "each package in one extra, or in the dependencies"


def test_the_page_to_install_lists_all_packages_and_extras() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    for heading, names in (("| package | provides |", packages()), ("| extra | for |", distributions()[META].extras)):
        rows = page.partition(heading)[2].partition("\n\n")[0]
        assert sorted(re.findall(r"(?m)^\| `(.*?)` \|", rows)) == sorted(names)


@EACH
def test_bounds_between_packages_hold_for_this_workspace(package: Package) -> None:
    """From below, the oldest version that has what is used, which CI tries; from above, the next that may break it."""
    for requirement in (Requirement(one) for one in package.requirements):
        if requirement.name in packages():
            assert {one.operator for one in requirement.specifier} == {">=", "<"}, str(requirement)
            assert packages()[requirement.name].project["version"] in requirement.specifier, str(requirement)


def test_a_citation_names_the_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == REPOSITORY and citation["license"] == distributions()[META].project["license"]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.wheels
@pytest.mark.quick_rows(1)
@EACH
def test_sdist_and_wheel(package: Package, tmp_path: Path) -> None:
    ((sdist, wheel),) = build([package], tmp_path / "dist").values()
    assert check([str(sdist), str(wheel)], strict=True) is False, "it says so above"
    with tarfile.open(sdist) as archive:
        files = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive.getmembers()}
        sources = {name: file.read() for name, file in files.items() if file is not None}
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    (direct,) = build_wheels([package], tmp_path / "direct").values()
    assert differing(direct, wheel) == [], "the sdist lacks a file, or has another"

    info = f"{package.module}-{package.project['version']}.dist-info"
    assert sources["LICENSE"] == contents[f"{info}/licenses/LICENSE"] == LICENSE
    assert {"README.md", "pyproject.toml"} <= sources.keys()
    if package.name != META:
        source = package.folder / "src"
        ours = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file() and file.suffix != ".pyc"}
        assert {name for name in contents if not name.startswith(info)} == ours
        assert f"{package.module}/py.typed" in ours
    metadata = email.message_from_bytes(contents[f"{info}/METADATA"])
    assert metadata.as_string() == email.message_from_bytes(sources["PKG-INFO"]).as_string()
    assert metadata["Author"] and metadata["License-Expression"] == "BSD-3-Clause" and metadata["License-File"] == "LICENSE"
    assert {one.partition(",")[0] for one in metadata.get_all("Project-URL", [])} == package.project["urls"].keys()

    description = metadata.get_payload()
    assert isinstance(description, str)
    readme = (package.folder / "README.md").read_text(encoding="utf-8")
    assert len(links(description)) == len(links(readme))
    for link in links(description):
        assert link.startswith("https://"), link
        if link.startswith(REPOSITORY):
            kind, tag, path = normpath(urlsplit(link.removeprefix(f"{REPOSITORY}/")).path).split("/", 2)
            assert kind in ("blob", "raw") and tag == f"{package.name}-v{package.project['version']}"
            assert (ROOT / path).exists(), link
