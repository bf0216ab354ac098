"""No text of a run runs a script in a browser: every field holds markup that would, and the page's policy forbids it too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tomli_w

from harness.browser import Visit, chromium, visit
from harness.made_runs import BEGAN, end, start, validation, write_run
from titan_core.cli.main import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ATTACKS = (
    "<img src=x onerror=hit()>", "\"><img src=x onerror=hit()>", "'><svg onload=hit()>", "</script><script>hit()</script>",
    "</style></title></textarea><img src=x onerror=hit()>", "<a href='javascript:hit()'>a</a>", "{{ hit() }}${hit()}%{hit}",
    "--><iframe srcdoc='<script>parent.hit()</script>'>", "&lt;img src=x onerror=hit()&gt;", "<a href=x>",
    "\" autofocus onfocus=hit() x=\"", "<style>*{color:red}</style>", "javascript:hit()",
)  # fmt: skip
TEXT = " ".join(ATTACKS)
"""A name or text of a run."""
_WATCH = """window.hits = []; window.hit = () => hits.push(new Error().stack); window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));"""


def hostile(value: Any) -> Any:
    """Return ``value`` with the attacks in every key that no reader requires, and in every text."""
    if isinstance(value, dict):
        return {**{key: hostile(one) for key, one in value.items()}, TEXT: TEXT}
    if isinstance(value, list):
        return [*map(hostile, value), TEXT]
    return f"{value}{TEXT}" if isinstance(value, str) else value


def write_hostile(folder: Path, attacks: Sequence[str]) -> Path:
    """Write a run with everything that a page shows, all of it hostile, and a metric for each of ``attacks``."""
    events = [
        {"event": "branch", "time": BEGAN, "step": 0, "parent": "../other"},
        start(stage="warm", recipe="a.toml", torch="2.15", model="llama3", parameters=10, began=BEGAN, launched=BEGAN),
        {"event": "spent", "time": BEGAN + 30, "step": 30, "seconds": {"steps": 30.0, "data": 2.0}},
        {"event": "checkpoint", "time": BEGAN + 40, "step": 40, "path": "checkpoint/step-40"},
        {"event": "checkpoint_failed", "time": BEGAN + 41, "step": 41, "why": "full", "message": "full"},
        {"event": "sample", "time": BEGAN + 42, "step": 42, "prompt": "Once", "text": "upon"},
        {"event": "finding", "time": BEGAN + 45, "step": 45, "kind": "loss spike", "message": "high"},
        {"event": "rewind", "time": BEGAN + 46, "step": 40, "from": 46, "documents": 1, "why": "spike"},
        start(40, at=60, stage="decay", recipe="b.toml", began=BEGAN + 60, launched=BEGAN),
        end(100, at=121, failed=True, error="ValueError: no", type="ValueError"),
    ]  # fmt: skip
    kept = ("event",)
    written = [{**hostile(event), **{key: event[key] for key in kept}} for event in events]
    for event in written:
        if "seconds" in event:
            event["seconds"] = {"steps": 30.0, TEXT: 1.0}
    config = hostile({"model": {"name": "llama3", "flavor": "8B"}, "optimizer": {"lr": 0.5}, "job": {"description": "mine"}})
    metrics = [
        *(f"group/{one}" for one in attacks),
        f"{TEXT}/{TEXT}",
        f"tokens_seen/{TEXT}",
        "tokens_seen/web",
        "a/b-c",
        "a-b/c",
    ]
    write_run(
        folder, steps=40, events=written, config=tomli_w.dumps(config),
        more=lambda step: {**{name: float(step) for name in metrics}, "text/all": TEXT, TEXT: TEXT},
        validations=[
            *({**validation(step, 5.5), f"validation_loss/{TEXT}": 4.0, f"group/{TEXT}": 1.0} for step in (30, 100)),
            *({"step": step, f"{TEXT}/{TEXT}": 0.5 + step, "time": BEGAN + step} for step in (50, 100)),
        ],
    )  # fmt: skip
    plugins = [{"name": TEXT, "distribution": f"titan-{one}", "version": f"1 {one}"} for one in ATTACKS]
    (folder / "plugins.json").write_text(json.dumps(plugins))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run with every attack in every field."""
    folder = tmp_path_factory.mktemp("hostile")
    run = write_hostile(folder / ATTACKS[0], [TEXT])
    assert main(["report", str(run), "--output", str(folder / "report.html")]) == 0
    return folder / "report.html"


def use(seen: Visit) -> None:
    """Do what a reader can: choose axes, hide runs, hover, save a picture."""
    page = seen.page
    for button in page.query_selector_all(".controls button"):
        button.click()
        button.click()
    page.evaluate(
        """() => { for (const chart of document.querySelectorAll(".chart.js-plotly-plot")) {
            const points = chart.data.map((trace, index) => ({curveNumber: index, pointNumber: 0}));
            try { Plotly.Fx.hover(chart, points); } catch (error) { if (!/hover|null|undefined/.test(error)) throw error; }
        } }"""
    )
    page.evaluate("() => Plotly.toImage(document.querySelector('.chart'), {format: 'svg'})")
    page.wait_for_timeout(100)


def require_harmless(report: Path, browser: Browser, whole: bool) -> None:
    """
    Args:
        whole: whether to use the page, too.
    """
    with visit(browser, report, script=_WATCH) as seen:
        page = seen.page
        for summary in page.query_selector_all("summary"):
            summary.click()
        if whole:
            use(seen)
        assert page.evaluate("hits") == [] and page.evaluate("violations") == [] and seen.complaints == []
        assert seen.outside() == [] and seen.requests == [report.resolve().as_uri()]
        # Buttons of plotly 6 are links without a target.
        strange = "main img, main iframe, main script:not([type]), main style, main a[href], main [onerror], main [onload]"
        assert page.query_selector_all(strange) == []
        charts = page.evaluate("[...document.querySelectorAll('.chart')].map((chart) => [chart.id, !!chart._fullLayout])")
        assert all(drawn for _, drawn in charts) and len({name for name, _ in charts}) == len(charts)
        text = page.inner_text("main")
        assert all(attack in text for attack in ATTACKS)
        assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") != "rgb(255, 0, 0)"


def test_no_text_of_a_run_runs_a_script(report: Path, browser: Browser) -> None:
    require_harmless(report, browser, whole=False)


@pytest.mark.full
def test_no_text_of_several_runs_runs_a_script(tmp_path: Path, browser: Browser) -> None:
    runs = [write_hostile(tmp_path / name, ATTACKS) for name in (ATTACKS[0], "'\"><svg onload=hit()>{{hit()}}")]
    assert main(["report", *map(str, runs), "--output", str(tmp_path / "report.html")]) == 0
    require_harmless(tmp_path / "report.html", browser, whole=True)


@pytest.mark.full
def test_the_policy_forbids_every_script_but_the_page_s_own(report: Path, browser: Browser) -> None:
    """The second fence: markup that did get into the page would do nothing."""
    with visit(browser, report, script=_WATCH) as seen:
        seen.page.evaluate(
            """() => { const holder = document.createElement("div"); document.body.append(holder);
                holder.innerHTML = "<img src=x onerror=hit()><a id=link href='javascript:hit()'>a</a>";
                const script = document.createElement("script"); script.text = "hit()"; holder.append(script);
                document.getElementById("link").click(); }"""
        )
        seen.page.wait_for_timeout(200)
        assert seen.page.evaluate("hits") == []
        assert set(seen.page.evaluate("violations")) >= {"script-src-attr", "script-src-elem"}
