"""How an error says to install a package of Titan."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

from titan_core.plugins import installing
from titan_core.plugins.installing import INDEX, how_to_install

UNKNOWN = "install the wheel of titan-x from where titan-core's came, or set TITAN_PACKAGE_INDEX"


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDEX, raising=False)


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str | None) -> None:
    folder.mkdir(exist_ok=True)
    if text is not None:
        (folder / "direct_url.json").write_text(text)
    monkeypatch.setattr(installing, "ours", lambda: importlib_metadata.PathDistribution(folder))


@pytest.mark.parametrize(
    "text",
    [
        None, "", "{", "[]", "null", '"x"', "{}", '{"url": 1}', '{"url": null}', '{"url": ""}', '{"url": "https://h/dist/a.whl"}',
        '{"url": "file://["}', '{"url": "file:///nowhere/titan_core-0.1.0-py3-none-any.whl"}',
    ],
)  # fmt: skip
def test_an_unknown_source(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, tmp_path / "info", text)
    assert how_to_install("titan-x").startswith(UNKNOWN)


def test_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "ours", lambda: None)
    assert how_to_install("titan-x").startswith(UNKNOWN)


def wheel(folder: Path, name: str, *requires: str) -> Path:
    path = folder / f"{name}-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = [f"Name: {name}", *(f"Requires-Dist: {one}" for one in requires)]
        archive.writestr(f"{name}-0.2.0.dist-info/METADATA", "\n".join(lines))
    return path


def test_paths_are_quoted_and_libraries_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's $HOME; here"
    folder.mkdir()
    core = wheel(folder, "titan_core", "torch>=2.11")
    recorded(monkeypatch, tmp_path / "info", json.dumps({"url": core.as_uri()}))
    paths = [core, wheel(folder, "titan_x", "titan-core<0.2,>=0.1", "titan-y<0.2,>=0.1", "torch>=2.11")]
    assert how_to_install("titan-x").startswith(UNKNOWN), "an installer would look the library up in an index"
    paths.append(wheel(folder, "titan_y"))
    quoted = " ".join("'" + str(path).replace("'", "'\"'\"'") + "'" for path in paths)
    assert how_to_install("titan-x") == f"install titan-x (`uv pip install {quoted}`)"


@pytest.mark.parametrize("content", [b"", b"PK"])
def test_a_wheel_that_cannot_be_read(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = wheel(tmp_path, "titan_core")
    (tmp_path / "titan_x-0.2.0-py3-none-any.whl").write_bytes(content)
    recorded(monkeypatch, tmp_path / "info", json.dumps({"url": core.as_uri()}))
    assert how_to_install("titan-x").startswith(UNKNOWN)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/simple", "https://host/simple"),
        ("file:///srv/index", "file:///srv/index"),
        ("https://host/$(touch x)&a='b'".replace(" ", "%20"), "'https://host/$(touch%20x)&a='\"'\"'b'\"'\"''"),
        ("https://someone:geheim@host/simple", '"$TITAN_PACKAGE_INDEX"'),
        ("https://geheim@host/simple", '"$TITAN_PACKAGE_INDEX"'),
        ("https://host/simple?token=geheim", '"$TITAN_PACKAGE_INDEX"'),
    ],
)
def test_an_index_of_the_setting(url: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDEX, url)
    assert how_to_install("titan-x") == f"install titan-x (`uv pip install --default-index {shown} titan-x`)"


@pytest.mark.parametrize(
    "value", ["pypi", "ftp://host/x", "//host", "https://host/a b", "https://host/\x1b[2J", "https://["]
)
def test_a_setting_that_is_no_index(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDEX, value)
    hint = how_to_install("titan-x")
    assert hint.startswith("set TITAN_PACKAGE_INDEX to the URL of a package index") and value not in hint


def test_the_installed_packages_are_known() -> None:
    """The record of a real installation is read: a wheel's in the suite of titan-core alone, a folder's in the workspace."""
    distribution: Any = installing.ours()
    assert distribution is not None and json.loads(distribution.read_text("direct_url.json"))["url"].startswith("file://")
