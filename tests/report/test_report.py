"""`titan report`: the page in a browser, and its contents for runs of all kinds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.browser import Visit, chromium, visit
from harness.made_runs import CLOSING, end, eventful_loss, start, write_eventful, write_lines, write_run
from titan_core.cli.main import main
from titan_core.toolkit.runs.run_log import RunLog
from titan_report.charts import POINTS, line_charts
from titan_report.page import page, positions, write_report
from titan_report.shown import Table
from titan_testing.jobs import TINY, run_recipe

if TYPE_CHECKING:
    from playwright.sync_api import Browser


RUN: dict[str, object] = {
    **TINY, "training.steps": 12, "validation.enable": "true", "validation.dataset": "stdlib", "validation.steps": 1,
    "validation.freq": 6,
}  # fmt: skip


HOSTILE = "<script>document.title = 'owned'<b>"
"""A name that a page must show verbatim. (A directory name cannot contain a slash.)"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A real run, and one with everything a page can show."""
    folder = tmp_path_factory.mktemp("runs")
    run_recipe("tiny", {**RUN, "job.dump_folder": str(folder / "real")})
    return [folder / "real", write_eventful(folder / HOSTILE)]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    assert main(["report", *map(str, runs)]) == 0
    return runs[0] / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def drawn(seen: Visit) -> dict[str, list[int]]:
    """Return the number of points of each curve on the page, by chart: the commands of its SVG path, or its markers."""
    return seen.page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => [chart.id,
            [...chart.querySelectorAll(".scatterlayer .trace, .barlayer .trace")].map((trace) => Math.max(
                trace.querySelectorAll(".points path").length,
                ...[...trace.querySelectorAll("path.js-line, path.js-fill")].map((path) =>
                    (path.getAttribute("d").match(/[MLHVC]/g) ?? []).length)))]))"""
    )


def colours(seen: Visit) -> dict[str, Any]:
    """Return the computed colours of the page, the first chart and all curves."""
    return seen.page.evaluate(
        """() => { const chart = document.getElementById("chart-loss"); return {
            page: getComputedStyle(document.body).backgroundColor,
            text: getComputedStyle(document.body).color,
            paper: getComputedStyle(chart.querySelector(".main-svg")).backgroundColor,
            ticks: getComputedStyle(chart.querySelector(".xtick text")).fill,
            curves: [...document.querySelectorAll("path.js-line")].map((line) => getComputedStyle(line).stroke),
        }; }"""
    )


def test_the_page_draws_every_chart_without_network_requests(report: Path, browser: Browser) -> None:
    with visit(browser, report) as seen:
        points = drawn(seen)
        assert list(points) == [
            "chart-loss", "chart-grad_norm", "chart-lr", "chart-throughput", "chart-memory", "chart-step_time-0",
            "chart-step_time-1", "chart-data_shares-1", "time-by-cause-0", "timeline-0", "timeline-1",
        ]  # fmt: skip
        assert all(curves and min(curves) >= 1 for curves in points.values()), points
        assert max(points["chart-loss"]) >= 30  # plotly omits points on a straight line
        assert max(points["chart-lr"]) >= 2
        assert seen.complaints == []
        assert seen.requests == [report.resolve().as_uri()]
        assert seen.outside() == []
        text = seen.page.inner_text("main")
        assert "optimizer.lr" in text and "0.5" in text and "9.9.9" in text
        assert "dump_folder" not in text  # always differs, so it is not listed; the config is collapsed
        assert HOSTILE in text
        assert seen.page.title() == "2 runs · Titan"
        seen.page.get_by_text("All events").nth(1).click()
        events = seen.page.inner_text("main")
        for event in ("killed: no output after this", "restarted after step 40", f"loss spike: {CLOSING}"):
            assert event in events
        assert re.search(r"restarted after step 40: 2 processes, dp_shard=2", events)


@pytest.mark.full
def test_an_open_page_follows_the_colour_scheme(report: Path, browser: Browser) -> None:
    with visit(browser, report, scheme="light") as seen:
        light = colours(seen)
        seen.page.emulate_media(color_scheme="dark")
        seen.page.wait_for_function(
            f"() => getComputedStyle(document.querySelector('.main-svg')).backgroundColor != '{light['paper']}'"
        )
        switched = colours(seen)
    with visit(browser, report, scheme="dark") as seen:
        dark = colours(seen)
    assert switched == dark
    for part in ("page", "text", "paper", "ticks"):
        assert light[part] != dark[part], part
    assert brightness(light["page"]) > 200 > 60 > brightness(dark["page"])
    assert brightness(light["paper"]) > 200 > 60 > brightness(dark["paper"])
    assert brightness(light["text"]) < 60 < 200 < brightness(dark["text"])
    assert all(one != other for one, other in zip(light["curves"], dark["curves"], strict=True))


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_one_column_and_only_tables_scroll_sideways(report: Path, browser: Browser, scheme: str) -> None:
    with visit(browser, report, width=390, scheme=scheme) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        for details in seen.page.locator("summary").all():
            details.click()
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        lefts = seen.page.evaluate(
            '[...document.querySelectorAll(".grid > *")].map((card) => card.getBoundingClientRect().left)'
        )
        assert len(set(lefts)) == 1
        assert seen.page.evaluate(
            '(() => { const t = document.querySelector(".scroll"); return t.scrollWidth > t.clientWidth })()'
        )
        assert all(curves and min(curves) >= 1 for curves in drawn(seen).values())
        assert seen.complaints == []


@pytest.mark.full
def test_a_run_has_one_colour_and_can_be_hidden(report: Path, browser: Browser) -> None:
    visible = """() => Object.fromEntries([...document.querySelectorAll(".chart")]
        .filter((chart) => chart.offsetParent).map((chart) => [chart.id,
        chart._fullData.filter((trace) => trace.visible).map((trace) => [trace.meta.run, trace.line?.color])]))"""
    with visit(browser, report) as seen:
        shown = seen.page.evaluate(visible)
        lines = [tuple(pair) for name in ("chart-grad_norm", "chart-lr", "chart-throughput") for pair in shown[name]]
        assert len(lines) == 6 and len(set(lines)) == 2
        dot = seen.page.evaluate("getComputedStyle(document.querySelectorAll('.chip .dot')[1]).backgroundColor")
        assert dot == rgb(dict(lines)[1])
        seen.page.locator(".chip").nth(1).click()
        hidden = seen.page.evaluate(visible)
        assert {run for traces in hidden.values() for run, _ in traces} == {0}
        assert shown.keys() - hidden.keys() == {"chart-step_time-1", "chart-data_shares-1", "timeline-1"}
        assert seen.page.locator(".chip").nth(1).get_attribute("aria-pressed") == "false"
        seen.page.locator(".chip").nth(1).click()
        assert seen.page.evaluate(visible) == shown


def test_positions_in_tokens_and_training_time(tmp_path: Path) -> None:
    """The first attempt was last heard of after 45 s. Step 100 followed 60 s after the restart."""
    run = RunLog.read(write_eventful(tmp_path / "run"))
    (found,) = positions([run], line_charts([run]))
    at = dict(zip(found["steps"], zip(found["tokens"], found["hours"], strict=True), strict=True))
    assert at[40] == (4096 * 40, pytest.approx(40 / 3600))
    assert at[100] == (4096 * 100, pytest.approx((45 + 60) / 3600))
    sparse = replace(run, steps=[record for record in run.steps if record["step"] % 20 == 0])
    (found,) = positions([sparse], line_charts([sparse]))
    assert found["steps"] == [20, 30, 40, 60, 80, 100] and found["tokens"][1] == 4096 * 30
    bare = replace(run, steps=[{"step": 1, "loss": 2.0}], validations=[], events=[])
    assert positions([bare], line_charts([bare])) == [{"steps": [1], "tokens": [None], "hours": [None]}]


@pytest.mark.full
def test_the_charts_can_be_drawn_over_tokens_and_time(report: Path, browser: Browser) -> None:
    shown = """() => { const chart = document.getElementById("chart-loss"); const axis = chart._fullLayout.xaxis;
        return [axis.title.text, axis.range.map(Number), Math.max(...chart._fullData.flatMap((t) => t.x))]; }"""
    with visit(browser, report) as seen:
        assert seen.page.locator("[data-axis]").all_inner_texts() == ["Steps", "Tokens", "Time"]
        steps = seen.page.evaluate(shown)
        assert steps[0] == "step" and steps[2] == 100
        seen.page.get_by_role("button", name="Tokens").click()
        title, span, last = seen.page.evaluate(shown)
        assert title == "tokens" and last == 4096 * 100 and span[1] == last
        seen.page.get_by_role("button", name="Time").click()
        title, span, last = seen.page.evaluate(shown)
        assert title in ("seconds of training", "minutes of training") and last > 0 and span[1] == pytest.approx(last)
        assert seen.page.locator("[data-axis=hours]").get_attribute("aria-pressed") == "true"
        assert all(curves and min(curves) >= 1 for curves in drawn(seen).values())
        seen.page.get_by_role("button", name="Steps").click()
        assert seen.page.evaluate(shown) == steps
        assert seen.complaints == []


@pytest.mark.full
@pytest.mark.parametrize("width", [400, 1400])
def test_no_table_is_cut_off(report: Path, browser: Browser, width: int) -> None:
    """A table is as wide as its card, or scrolls within it and shows so."""
    with visit(browser, report, width=width) as seen:
        for details in seen.page.locator("summary").all():
            details.click()
        cut = seen.page.evaluate(
            """() => [...document.querySelectorAll("table")].filter((table) => {
                const frame = table.closest(".scroll"), card = table.closest(".card").getBoundingClientRect();
                return frame.getBoundingClientRect().right > card.right || getComputedStyle(frame).overflowX !== "auto";
            }).length"""
        )
        assert cut == 0
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def figures_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_escapes_all_text_from_runs(tmp_path: Path) -> None:
    text = page([RunLog.read(write_eventful(tmp_path / HOSTILE)), RunLog.read(write_run(tmp_path / "b"))])
    own = text.replace(re.search(r"<script>/\*\*.*?</script>", text, re.DOTALL)[0], "")  # type: ignore[index]
    assert "<b>" not in own
    assert own.count("<script") == own.count("</script>") == 3
    assert "default-src &#39;none&#39;" in own and "script-src &#39;unsafe-inline" not in own
    assert not re.search(r"(src|href)=\"(?!data:)", own)


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    figures = figures_of(page([RunLog.read(write_eventful(tmp_path / "a"))]))
    highest, loss, checks = figures["chart-loss"]["data"]
    assert loss["y"][48:51] == [eventful_loss(49), None, eventful_loss(51)]
    assert highest["y"][48] == pytest.approx(0.2 + (eventful_loss(49) or 0))
    assert (checks["x"], checks["y"]) == ([30, 100], [5.5, 4.25])


@pytest.mark.parametrize(("lr", "span"), [(3e-4, [0, 4.5e-4]), (0.0, [-1, 1])])
def test_a_constant_has_a_readable_axis(tmp_path: Path, lr: float, span: list[float]) -> None:
    figure = figures_of(page([RunLog.read(write_run(tmp_path / "a", more=lambda step: {"lr": lr}))]))["chart-lr"]
    assert figure["layout"]["yaxis"]["range"] == pytest.approx(span)


def test_more_runs_than_colours_are_still_distinct(tmp_path: Path) -> None:
    runs = [RunLog.read(write_run(tmp_path / str(number), steps=2, more=lambda step: {"lr": step})) for number in range(20)]
    text = page(runs)
    lines = [trace["line"] for trace in figures_of(text)["chart-lr"]["data"]]
    assert len({(line["color"], line["dash"]) for line in lines}) == 20
    assert len(set(re.findall(r'<button [^>]*><i class="(dot round-\d)" style="--run: (.*?)">', text))) == 20


def test_the_parts_of_the_step_time_add_up(tmp_path: Path) -> None:
    data = figures_of(page([RunLog.read(write_run(tmp_path / "a"))]))["chart-step_time-0"]["data"]
    assert [trace["name"] for trace in data] == ["forward and backward", "optimizer", "data", "checkpoint", "other"]
    assert [sum(column) for column in zip(*(trace["y"] for trace in data), strict=True)] == pytest.approx([1.0] * 100)


@pytest.mark.parametrize("events", [[], [start()]], ids=["none", "start"])
def test_a_run_without_a_step_has_a_page(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    text = page([RunLog.read(write_run(tmp_path / "a", steps=0, events=events))])
    assert "No step has been logged yet." in text


def test_older_and_foreign_records_still_get_charts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=0)
    write_lines(run / "metrics.jsonl", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    text = page([RunLog.read(run)])
    assert [name for name in figures_of(text) if name.startswith("chart")] == ["chart-loss"]
    assert "not finite" in text


@pytest.mark.full
def test_long_runs_are_thinned_and_quick(tmp_path: Path) -> None:
    spike = 61_803
    run = write_run(
        tmp_path / "long",
        steps=100_000,
        more=lambda step: {"loss": 99.0 if step == spike else 2 + step % 7, "loss_max": None},
    )
    began = time.process_time()  # excludes other load on the machine
    text = page([RunLog.read(run)])
    assert time.process_time() - began < 10  # about 2 s
    figures = figures_of(text)
    assert all(len(trace["x"]) <= POINTS for figure in figures.values() for trace in figure["data"])
    (loss,) = figures["chart-loss"]["data"]
    assert loss["y"][loss["x"].index(spike)] == 99.0
    assert len(text) < 7_000_000


def test_the_page_masks_secrets_but_shows_that_they_differ(tmp_path: Path) -> None:
    lines = (
        '[wandb]\napi_keys = ["s3cret-{0}"]\npin_token = 40030020010077{0}\nproject = "p"\n[secrets]\nanything = "s3cret"\n'
        '[data]\npath = "https://user:s3cret@host/a"\n[model]\ntokenizer = "byte"\n'
    )
    failed = end(100, at=101, failed=True, error="ConnectionError: https://user:s3cret@host refused")
    runs = [
        RunLog.read(write_run(tmp_path / f"run-{number}", config=lines.format(number), events=[start(), failed]))
        for number in range(2)
    ]
    text = page(runs)
    assert "s3cret" not in text and "40030020010077" not in text
    assert "https://(redacted)@host/a" in text and "ConnectionError: https://(redacted)@host refused" in text
    assert "tokenizer = &#34;byte&#34;" in text and "project = &#34;p&#34;" in text
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', text)
    assert [row[0] for row in rows] == ["wandb.api_keys", "wandb.pin_token"]
    assert {cell for row in rows for cell in row[1:]} == {"&#34;(redacted)&#34;"}


def test_the_table_of_the_caller_comes_first(tmp_path: Path) -> None:
    runs = [RunLog.read(write_run(tmp_path / name)) for name in "ab"]
    write_report(runs, tmp_path / "new" / "r.html", Table("Best & first", ("variant", "loss"), (("a", "1.0"), ("b", "2.0"))))
    text = (tmp_path / "new" / "r.html").read_text()
    assert text.index("Best &amp; first") < text.index("Summary")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err
    run = write_run(tmp_path / "a")
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", str(run), "--png", "pictures"]) == 2
    assert "save a chart by the camera" in capsys.readouterr().err
