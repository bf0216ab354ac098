"""Descriptions of machines: those that come with Titan, and mistakes in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("titan_simulate")

from titan_core.api import UserError
from titan_core.toolkit.device import attention_order
from titan_simulate.hardware.read import names, read_machine


def test_every_machine_can_be_read_and_is_slower_than_its_data_sheet() -> None:
    assert {"h100", "h100-96gb", "h200", "a100", "b200", "mi300x"} <= set(names())
    for name in names():
        machine = read_machine(name)
        for rates in machine.matmul.values():
            assert rates.achievable_tflops < rates.peak_tflops
        assert machine.links.network.bandwidth_gb_s < machine.links.node.bandwidth_gb_s < machine.memory.bandwidth_gb_s


def test_the_figures_of_attention_are_those_of_the_kernel_that_titan_prefers() -> None:
    """Hopper was assumed to run FlashAttention 2, where Titan prefers cuDNN's attention."""
    for name in set(names()) - {"mi300x"}:  # ROCm has no cuDNN, so the first kernel there is never available
        machine = read_machine(name)
        major, _, minor = machine.capability.partition(".")
        assert machine.attention.kernel == attention_order((int(major), int(minor)))[0], name
    assert (attention_order((8, 9))[:2], attention_order((9, 0))[:2]) == (("flash", "cudnn"), ("cudnn", "flash"))
    assert read_machine("mi300x").attention.kernel == "flash"


def test_a_file_may_change_some_figures_of_a_known_machine(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('base = "h100"\nname = "ours"\n[links.network]\nbandwidth_gb_s = 20.0\n')
    ours, base = read_machine(str(file)), read_machine("h100")
    assert ours.links.network.bandwidth_gb_s == 20.0
    assert ours.links.network.latency_us == base.links.network.latency_us
    assert ours.matmul == base.matmul


def test_the_page_about_estimates_lists_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith(("| `", "| (top)")))
    documented = set()
    for tables, keys in rows.items():
        for table in tables.replace("(top)", "").replace("`", "").split(", "):
            documented |= {f"{table}.{key}".strip(".") for key in re.findall(r"`(\w+)`", keys.partition(";")[0])}
    known = {re.sub(r"^matmul\.\w+", "matmul.TYPE", key) for key in read_machine("h100").assumptions()}
    assert documented == known


def test_a_device_without_8_bit_units_computes_in_bf16() -> None:
    machine = read_machine("a100")
    assert machine.matmul_of("fp8") == machine.matmul_of("bf16") == machine.matmul["bf16"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory = 3", "memory: should be a table"),
        ("nam = 'x'", "nam: unknown key"),
        ("[matmul.bf16]\npeak_tflops = nan", "matmul.bf16.peak_tflops"),
        ("[matmul.bf16]\npeak_tflops = 1.0", "achievable_tflops is larger than peak_tflops"),
        ("[matmul.fp7]\npeak_tflops = 2.0\nachievable_tflops = 1.0", "unknown type 'fp7'"),
        ("[links.node]\nlatency_us = 'a'", "links.node.latency_us = 'a'"),
        ("memory_gib = -1.0", "memory_gib = -1.0"),
        ("[links", "not valid TOML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_key(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f'base = "h100"\n{text}\n')
    with pytest.raises(UserError) as error:
        read_machine(str(file))
    assert str(file) in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize("value", ["3", "['h100']", "{name = 'h100'}", "false", "''", "'h1000'"])
def test_a_base_that_is_no_machine_is_an_error(tmp_path: Path, value: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(f"base = {value}\n")
    with pytest.raises(UserError, match=r"bad\.toml: base") as error:
        read_machine(str(file))
    assert "h100" in str(error.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('name = "empty"\n')
    with pytest.raises(UserError, match="memory_gib: is required"):
        read_machine(str(file))


@pytest.mark.parametrize("name", ["h1000", "nowhere.toml", "a/b"])
def test_an_unknown_machine_is_an_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(UserError, match="mi300x"):
        read_machine(name)
