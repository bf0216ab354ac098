"""The rehearsal of a release, in its short form: ``titan-llm`` without an extra."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from ci import support
from ci.rehearse import differing, rehearse, required, tagged
from ci.workspace import META, distributions, packages


@pytest.mark.wheels
@pytest.mark.full
def test_everything_but_the_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = rehearse("", tmp_path / "dist", sys.executable)
    assert files.keys() == {META, "titan-completion", "titan-core", "titan-models-llama", "titan-nn"}
    assert capsys.readouterr().out.splitlines() == [
        "built 5 sdists, and a wheel from each", "wheels from the repository are the same", "twine check passed",
        "installed titan-llm from the index", "trained a step",
    ]  # fmt: skip


def test_a_file_that_the_sdist_lacks_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel, direct = tmp_path / "wheel", tmp_path / "direct"
    for file, names in ((wheel, ["a.py"]), (direct, ["a.py", "b.toml"])):
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, "")
    monkeypatch.setattr("ci.rehearse.build", lambda *_: {"titan-core": (tmp_path / "sdist", wheel)})
    monkeypatch.setattr("ci.rehearse.build_wheels", lambda *_: {"titan-core": direct})
    with pytest.raises(SystemExit, match=r"the sdist of titan-core gives another wheel than the repository: b.toml differ"):
        rehearse("", tmp_path / "dist", sys.executable)


def test_what_an_extra_requires() -> None:
    assert {one.name for one in required("all")} == distributions().keys()
    assert {one.name for one in required("plan")} - {one.name for one in required("")} == {"titan-simulate"}


def test_wheels_that_differ(tmp_path: Path) -> None:
    for name, files in {"one": {"same": "1", "changed": "1", "only": "1"}, "other": {"same": "1", "changed": "2"}}.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
    assert differing(tmp_path / "one", tmp_path / "other") == ["changed", "only"]


def test_a_tag_is_of_this_commit_and_of_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    core = packages()["titan-core"]
    tag = f"{core.name}-v{core.project['version']}"
    assert tagged(tag) == core
    for wrong in ("titan-core-v99.0", "titan-flat8-v0.1.0", "v0.1.0"):
        with pytest.raises(SystemExit, match=f"{wrong} is no release of this commit, which can have .*{tag}"):
            tagged(wrong)
    server, owner, repository = core.project["urls"]["Repository"].rsplit("/", 2)
    monkeypatch.setenv("GITHUB_SERVER_URL", server)
    monkeypatch.setenv("GITHUB_REPOSITORY", f"{owner}/{repository}")
    assert tagged(tag) == core
    monkeypatch.setenv("GITHUB_REPOSITORY", f"stranger/{repository}")
    with pytest.raises(SystemExit, match=r"CONTRIBUTING.md says how to set the address"):
        tagged(tag)


def test_the_table_of_what_works_with_what_is_that_of_the_metadata() -> None:
    assert support.PAGE.read_text(encoding="utf-8") == support.render(), "run `uv run python -m ci.support`"
    assert all(f"| `{name}` | {one.project['version']} | 3.11, " in support.table() for name, one in distributions().items())


def test_a_page_without_a_place_for_the_table_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(support, "ROOT", tmp_path)
    monkeypatch.setattr(support, "PAGE", tmp_path / "install.md")
    support.PAGE.write_text("# Install\n")
    with pytest.raises(SystemExit, match=r"install\.md: has no line `<!-- uv run python -m ci\.support -->`"):
        support.render()
