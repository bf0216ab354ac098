"""The page that ``titan estimate --explain-html`` writes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("titan_simulate")

from titan_core.api import UserError
from titan_simulate.cli.explained_page import page, write_page
from titan_simulate.cli.icicle import LEVEL, WIDTH, Node, icicle
from titan_simulate.estimate.explain import CollectiveRow, Explanation, MemoryRow, TimeRow

RECT = re.compile(r'<rect class="([^"]+)" x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="(\d+)"/>')


def boxes(svg: str) -> list[tuple[str, float, float, int, int]]:
    """Return class, left and right edge, top and height of each box."""
    return [
        (style, float(x), float(x) + float(width), int(y), int(height)) for style, x, y, width, height in RECT.findall(svg)
    ]


def test_an_icicle_divides_each_level_by_shares() -> None:
    root = Node("all")
    for path, style, value in ((["b"], "one", 1.0), (["a", "x"], "two", 2.0), (["a"], "three", 1.0)):
        root.add(path, style, value)
    drawn = icicle(root, lambda value: f"{value:g} s", order=["b"])
    whole, first, inner, part, itself = boxes(drawn)
    assert whole[:3] == ("inner", 0.0, WIDTH)
    assert first[0] == "one" and first[1:3] == pytest.approx((0.0, WIDTH / 4)) and first[3] == LEVEL
    assert inner[0] == "inner" and inner[1:3] == pytest.approx((WIDTH / 4, WIDTH), abs=0.1)
    assert (part[0], itself[0]) == ("two", "three")
    assert part[1:3] == pytest.approx((WIDTH / 4, WIDTH * 3 / 4), abs=0.1)
    assert itself[1:3] == pytest.approx((WIDTH * 3 / 4, WIDTH), abs=0.1)
    assert len({y + height for _, _, _, y, height in (first, part, itself)}) == 1  # leaves reach down to the lower edge
    assert "<title>a / x: 2 s, 50.0%</title>" in drawn


def test_what_is_narrow_is_drawn_together() -> None:
    root = Node("all")
    for number in range(1000):
        root.add([f"small {number}"], "one", 1.0)
    root.add(["large"], "two", 1000.0)
    _, large, others = boxes(icicle(root, str))
    assert (large[0], others[0]) == ("two", "others")
    assert others[1:3] == pytest.approx((WIDTH / 2, WIDTH))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


EVIL = "<script>alert(1)</script>"


def explanation() -> Explanation:
    return Explanation(
        rank=0,
        time=(TimeRow(EVIL, "forward", "matmul", "", 0.75), TimeRow("-", EVIL, "exposed communication", EVIL, 0.25)),
        collectives=(CollectiveRow(EVIL, "c10d::_allgather_base_", EVIL, 8, 2.0, 1.0, 0.5, 0.25),),
        memory=(MemoryRow("layers.*.w", "parameters", 2.0), MemoryRow("-", "allocator, idle", 1.0)),
    )


def estimate() -> Any:
    figures = {"step_seconds": 1.0, "peak_gib": 3.0, "mfu": 0.4, "tokens_per_second_per_gpu": 1000.0, "fits": False}
    words = {"device": EVIL, "mesh": EVIL, "moment": EVIL}
    return cast("Any", SimpleNamespace(world_size=8, rank=0, **figures, **words))


def test_the_page_runs_nothing_loads_nothing_and_escapes_names() -> None:
    text = page(estimate(), explanation(), EVIL, capacity=4.0)
    found = _Tags()
    found.feed(text)
    assert "script" not in found.tags and not found.addresses
    assert "default-src 'none'" in text and "url(" not in text
    assert "does not fit" in text and "&lt;script&gt;" in text
    assert text.count('<rect class="c0"') >= 2 and 'width="75.000%"' in text  # of time, and of the device's memory
    assert found.tags.count("tr") == 1 + 1 + 1 + 2 + 1 + 2


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--explain-html .*cannot be written"):
        write_page(tmp_path / "file" / "page.html", estimate(), explanation(), "tiny", 4.0)
