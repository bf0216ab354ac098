"""Draws the pictures in ``docs/images`` from two runs: the report in Chromium, and ``titan watch`` on a recorded console::

uv run titan train --job.dump_folder outputs/lr-2e-3 --validation.enable --validation.dataset stdlib --validation.steps 4
uv run titan train --job.dump_folder outputs/lr-6e-3 --optimizer.lr 6e-3 --validation.enable ...
uv run python -m ci.pictures outputs/lr-2e-3 outputs/lr-6e-3
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from ci.workspace import ROOT
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.dashboard import frame
from titan_report.followed_run import FollowedRun
from titan_report.page import write_report

PICTURES = ROOT / "docs/images"
_TOP = 1180
"""Height of the picture in README: the summary and the first charts."""


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, metavar="RUN", type=Path)
    runs: list[Path] = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        write_report([RunLog.read(run) for run in runs], page)
        _photograph(page)
    followed = FollowedRun(runs[1])
    followed.poll()
    console = Console(record=True, width=92, height=28, file=open(os.devnull, "w"))  # noqa: SIM115 - open as long as we are
    console.print(frame(followed, 92, 28))
    console.save_svg(str(PICTURES / "watch.svg"), title=f"titan watch {runs[1]}")


def _photograph(page: Path) -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        desktop = browser.new_page(viewport={"width": 1280, "height": _TOP})
        desktop.goto(page.as_uri())
        desktop.screenshot(path=PICTURES / "report-top.png")
        desktop.screenshot(path=PICTURES / "report.png", full_page=True)
        phone = browser.new_page(viewport={"width": 400, "height": 515}, device_scale_factor=3)
        phone.goto(page.as_uri())
        phone.screenshot(path=PICTURES / "report-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
