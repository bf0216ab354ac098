"""The documentation site: built without a warning, complete, and whole in a browser, wide and narrow, without network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci.contract import hook_names, importable_names
from harness.browser import chromium, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    built = subprocess.run([sys.executable, "-m", "ci.site", folder], cwd=ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def pages_of(site: Path) -> list[Path]:
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def test_the_reference_describes_each_name_of_the_contract(site: Path) -> None:
    entries: dict[str, str] = {}
    for page in site.glob("reference/**/*.html"):
        for name, text in re.findall(
            r'(?s)<dt class="[^"]*" id="titan_core\.api\.([\w.]+)">.*?</dt>\s*<dd>(.*?)</dd>', text_of(page)
        ):
            entries[name] = re.sub(r"<[^>]*>|\s", "", text)
    assert 'id="titan_nn.decoder.DecoderBlock"' in text_of(site / "reference/titan_nn/decoder.html")
    wanted = (
        importable_names()
        | {"ObjectiveFunction.__call__", "JobMesh.__getitem__", "TrainingContext.section"}
        | {f"hookspecs.{hook}" for hook in hook_names()}
    )
    assert sorted(wanted - entries.keys()) == []
    assert sorted(name for name in wanted if not entries[name]) == []


def test_roles_and_titles_are_rendered(site: Path) -> None:
    raw = re.compile(r":(?:class|func|meth|mod|attr|data|exc):|&lt;no title&gt;|::</p>")
    described = [page for page in pages_of(site) if page.relative_to(site).parts[0] != "code"]
    assert {page.name: found for page in described if (found := raw.findall(text_of(page)))} == {}


def test_links_within_the_site_lead_somewhere(site: Path) -> None:
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text_of(page))) for page in pages_of(site)}
    broken, counted = set(), 0
    for page in anchors:
        for path, anchor in re.findall(r'href="(?!\w+:)([^"#?]*)(?:\?[^"#]*)?(?:#([^"]*))?"', text_of(page)):
            target = (page.parent / path).resolve() if path else page
            counted += 1
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                broken.add((page.relative_to(site).as_posix(), path, anchor))
    assert counted > 1000
    assert broken == set()


def test_a_guide_links_to_the_reference_and_to_code(site: Path) -> None:
    guide = text_of(site / "plugins/model.html")
    assert 'href="../reference/model/layout.html#titan_core.api.ModelLayout"' in guide
    assert 'href="../examples/titan-model-hybrid.html"' in guide
    assert 'href="../code/examples/titan-model-hybrid/src/titan_model_hybrid/divided.py.html"' in guide
    assert 'href="../code/packages/titan-parallel/src/titan_parallel/fsdp.py.html"' in text_of(
        site / "plugins/parallelism.html"
    )
    example = text_of(site / "examples/titan-model-hybrid.html")
    assert 'href="../code/examples/titan-model-hybrid/src/titan_model_hybrid/scan.py.html"' in example
    shown = re.sub(r"<[^>]*>", "", text_of(site / "code/examples/titan-model-hybrid/src/titan_model_hybrid/divided.py.html"))
    assert "def divided(" in shown


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize(
    "name", ["index", "guides", "architecture", "plugins/model", "parallelism", "reference/model/layout_rules"]
)
def test_a_page_fits_its_window_and_needs_no_network(site: Path, browser: Browser, name: str, width: int) -> None:
    with visit(browser, site / f"{name}.html", width) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        hidden = """() => [...document.querySelectorAll('.bd-article p, .bd-article dt, .bd-article h1')]
            .filter(one => !one.closest('.pst-scrollable-table-container') && one.scrollWidth > one.clientWidth + 1)
            .map(one => one.textContent)"""
        assert seen.page.evaluate(hidden) == []
        assert seen.outside() == []


def test_search_finds_a_name_without_network(site: Path, browser: Browser) -> None:
    with visit(browser, site / "index.html", 1400) as seen:
        seen.page.goto(f"{(site / 'search.html').as_uri()}?q=SequenceShare")
        first = seen.page.locator("#search-results a").first
        assert "SequenceShare" in first.inner_text()
        first.click()
        seen.page.wait_for_url("**/reference/model/sequence_share.html*")
        assert seen.outside() == []
