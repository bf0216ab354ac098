"""Opens pages that the tests write in a real browser: the system's Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a headless browser. If there is none, skip the test, or fail it if ``TITAN_REQUIRE_BROWSER`` is set.
    ``CHROMIUM`` names a browser that is not on the path."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        reason = f"no browser is installed (CHROMIUM, or one of {', '.join(_NAMES)})"
        if os.environ.get("TITAN_REQUIRE_BROWSER"):
            pytest.fail(reason)
        # A developer's machine may have none; `.ci/run` installs one where it can, and then requires it.
        pytest.skip(f"opens pages in a real browser, and {reason}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=_QUIET)
        yield browser
        browser.close()


@dataclass
class Visit:
    """An opened page, with its requests and errors."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors of scripts, and errors and warnings on the console."""

    def outside(self) -> list[str]:
        """Return the requests for anything but local files."""
        return [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]


@contextmanager
def visit(browser: Browser, file: Path, width: int = 1280, scheme: Any = "light", script: str = "") -> Iterator[Visit]:
    """Open ``file`` in a window of ``width`` pixels (below 500, a phone's) and the colour scheme ``scheme``.

    Args:
        script: runs before those of the page.
    """
    phone = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": 844 if phone else 800}, color_scheme=scheme, has_touch=phone, is_mobile=phone
    )
    seen = Visit(context.new_page())
    seen.page.add_init_script(script)
    seen.page.on("request", lambda request: seen.requests.append(request.url))
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on(
        "console", lambda message: seen.complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    seen.page.goto(file.resolve().as_uri())
    yield seen
    context.close()
