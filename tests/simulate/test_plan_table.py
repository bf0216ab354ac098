"""The table of several machines and numbers of GPUs, of plans that are made up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from harness.planned import candidate_of, mesh_of
from titan_core.api import UserError
from titan_simulate.cli.plan import arguments
from titan_simulate.cli.plan_inputs import Device, check_inputs, prices, read_devices, token_count
from titan_simulate.cli.plan_model import TOKENS_PER_STEP, default_batch
from titan_simulate.cli.plan_table import PlannedRow, conclude_table, knee_of, powers_of_two, rows_of
from titan_simulate.cli.run_length import RunLength, show_amount
from titan_simulate.hardware.read import read_machine
from titan_simulate.plan.compose import Composition
from titan_simulate.plan.result import INTERRUPTED, Finalist, Plan

BATCH = 1_000_000
"""Tokens of a step."""


@dataclass(frozen=True)
class _Figures:
    peak_gib: float
    step_seconds: float
    tokens_per_second_per_gpu: float
    mfu: float = 0.5


def plan_of(gpus: int, speed: float, stopped: str | None = None) -> Plan:
    """Return a plan whose best candidate computes ``speed`` tokens/s on each GPU."""
    figures = _Figures(70.0, BATCH / speed / gpus, speed)
    candidate = candidate_of(mesh_of(dp_shard=gpus))
    return Plan(1, [Finalist(candidate, Composition({}, {}), figures)], stopped=stopped, model="small (1M parameters)")


def device(name: str = "h100", price: float | None = None) -> Device:
    return Device(name, read_machine(name), price)


def rows(speeds: Mapping[int, float], of: Device | None = None) -> list[PlannedRow]:
    return [PlannedRow(of or device(), gpus, plan_of(gpus, speed)) for gpus, speed in speeds.items()]


def options_of(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    arguments(parser)
    return parser.parse_args([*given])


TABLE = ("--max-gpus", "8")


def shown(capsys: pytest.CaptureFixture[str], found: Sequence[PlannedRow], *given: str) -> tuple[int, list[list[str]], str]:
    """Return the exit status, the rows of the table by cells, and all that is printed."""
    status = conclude_table(found, options_of(*TABLE, *given), [])
    text = capsys.readouterr().out
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("device"))
    return status, [line.split() for line in lines[first : first + len(found) + 1]], text


def test_the_knee_is_where_twice_the_gpus_begin_to_save_less_than_two_fifths() -> None:
    """Of 1,000 to 900 tokens/s, 44% are saved; of 900 to 720, 37.5%."""
    found = rows({1: 1000, 2: 900, 4: 720, 8: 400})
    assert knee_of(found) is found[1]
    assert knee_of(rows({1: 1000, 2: 950, 4: 900})) is None
    exactly = rows({1: 1200, 2: 1000})  # 40% of the time
    assert knee_of(exactly) is None


def test_there_is_no_knee_after_a_row_that_is_not_complete() -> None:
    found = rows({1: 1000, 2: 950, 4: 900, 8: 100})
    assert knee_of(found) is found[2]
    late = PlannedRow(device(), 4, plan_of(4, 900, INTERRUPTED))
    assert knee_of([*found[:2], late, found[3]]) is None
    assert knee_of([*found[:2], PlannedRow(device(), 4, Plan(0, stopped=INTERRUPTED)), found[3]]) is None


def test_rows_without_a_plan_are_passed_over_by_the_knee() -> None:
    found = rows({2: 1000, 4: 950, 8: 500})
    assert knee_of([PlannedRow(device(), 1, Plan(4)), *found]) is found[1]  # nothing fits one
    assert knee_of([found[0], PlannedRow(device(), 4, None, "no mesh"), found[2]]) is None
    assert knee_of([found[0], PlannedRow(device(), 4, None, "no mesh"), *rows({8: 900}), *rows({16: 500})]) is not None


def test_a_run_takes_whole_steps() -> None:
    figures = _Figures(1.0, 2.0, BATCH / 2 / 4)
    length = RunLength.of(10 * BATCH + 1, figures, 4, 3.0)
    assert length.steps == 11
    assert [length.days, length.gpu_hours, length.price] == pytest.approx([22 / 86400, 22 * 4 / 3600, 22 * 4 / 3600 * 3.0])
    assert RunLength.of(10 * BATCH, figures, 4, None).steps == 10
    assert "within the budget of 1.0" in length.describe(10 * BATCH, 1.0)
    assert "MORE THAN the budget of 0.010" in length.describe(10 * BATCH, 0.01)


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (99.94, "100"), (12.3, "12"), (1.234, "1.2"), (0.0123, "0.012")]
)
def test_amounts_have_two_digits(value: float, text: str) -> None:
    assert show_amount(value) == text


def test_a_row_has_days_hours_and_price_of_the_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    """10^12 tokens, at 1,000 tokens/s for each GPU, take 277,778 GPU-hours."""
    found = [*rows({4: 1000, 8: 900}, device("h100", 2.0)), *rows({8: 2000}, device("b200"))]
    status, table, text = shown(capsys, found, "--tokens", "1T", "--budget-hours", "300000")
    assert status == 0 and text.startswith("small (1M parameters)")
    assert table[0] == ["device", "GPUs", "GiB", "tokens/s/GPU", "MFU", "days", "GPU-hours", "price", "mesh"]
    budget = ["within", "the", "budget"]
    assert table[1] == ["h100", "4", "70.0", "1,000", "50.0%", "2,894", "277,778", "555,556", "dp_shard=4", *budget]
    assert table[2] == ["h100", "8", "70.0", "900", "50.0%", "1,608", "308,642", "617,284", "dp_shard=8"]
    assert table[3] == ["b200", "8", "70.0", "2,000", "50.0%", "723", "138,889", "-", "dp_shard=8", *budget]
    assert "no knee" in text and "NOT COMPLETE" not in text


def test_rows_are_in_order_and_the_knee_of_each_machine_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    found = [*rows({4: 600, 2: 950, 1: 1000}), *rows({2: 1000, 1: 2000}, device("b200"))]
    status, table, text = shown(capsys, found)
    assert status == 0
    assert [(row[0], row[1], row[-1] == "knee") for row in table[1:]] == [
        ("h100", "1", False), ("h100", "2", True), ("h100", "4", False), ("b200", "1", True), ("b200", "2", False)
    ]  # fmt: skip
    assert "knee: from there on, twice the GPUs save less than 40% of the time" in text


def test_json_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    found = [*rows({1: 1000, 2: 600}), PlannedRow(device("b200"), 2, None, "no mesh has it")]
    options = options_of(*TABLE, "--json", "--tokens", "1B", "--budget-hours", "278")
    assert conclude_table(found, options, []) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["tokens"], table["complete"], table["knee_saves_less_than"]) == (10**9, True, 0.4)
    one, two, none = table["rows"]
    assert (one["name"], one["gpus"], one["knee"], one["run"]["within_budget"]) == ("h100", 1, True, True)
    assert one["run"]["gpu_hours"] == pytest.approx(10**9 / 1000 / 3600) and one["run"]["steps"] == 1000
    assert one["best"][0]["tokens_per_second_per_gpu"] == 1000 and one["complete"]
    assert (two["knee"], two["run"]["within_budget"]) == (False, False)
    assert none == {"name": "b200", "gpus": 2, "knee": False, "run": None, "refusal": "no mesh has it"}


def test_a_row_that_is_not_complete_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = [PlannedRow(device(), 2, plan_of(2, 1000, INTERRUPTED)), *rows({1: 1000})]
    status, table, text = shown(capsys, found)
    assert status == 130
    assert table[2][-4:] == ["NOT", "COMPLETE", "(an", "interrupt)"] and "NOT" not in table[1]
    assert "\nNOT COMPLETE: faster candidates" in text and "knee" not in text
    interrupted = PlannedRow(device(), 4, Plan(0, stopped=INTERRUPTED))
    status, table, _ = shown(capsys, [interrupted, *found])
    assert status == 130 and table[3][:6] == ["h100", "4", "-", "-", "-", "-"]


def test_if_nothing_fits_the_status_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, table, _ = shown(capsys, [PlannedRow(device(), 8, Plan(4))])
    assert status == 1 and table[1][-2:] == ["nothing", "fits"]


def search_of(
    plans: Mapping[int, Plan | type[BaseException] | UserError], tried: list[int]
) -> Callable[[int, Device], Plan]:
    def search(gpus: int, device: Device) -> Plan:
        tried.append(gpus)
        found = plans[gpus]
        if isinstance(found, Plan):
            return found
        raise found

    return search


def test_fewer_gpus_than_do_not_fit_are_not_tried() -> None:
    tried: list[int] = []
    plans = {8: plan_of(8, 900), 4: plan_of(4, 1000), 2: Plan(4)}
    found = rows_of([device()], powers_of_two(9), 0.0, search_of(plans, tried))
    assert tried == [8, 4, 2] == [row.gpus for row in found]
    tried.clear()
    memory = read_machine("h100").memory_gib
    found = rows_of([device()], powers_of_two(8), 3 * memory, search_of(plans, tried))
    assert tried == [8, 4] == [row.gpus for row in found]  # two have too little for parameters and optimizer state
    tried.clear()
    rows_of([device()], powers_of_two(8), 100 * memory, search_of({8: Plan(4)}, tried))
    assert tried == [8]  # which says by how much


def test_numbers_without_a_mesh_are_rows_and_none_at_all_is_an_error() -> None:
    refusal = UserError.one("--gpus 4", "no mesh has this number of ranks", "change it")
    found = rows_of([device()], [4, 2], 0.0, search_of({4: refusal, 2: plan_of(2, 1000)}, []))
    assert [(row.gpus, row.refusal) for row in found] == [(4, "no mesh has this number of ranks"), (2, "")]
    with pytest.raises(UserError, match="--gpus 4: no mesh"):
        rows_of([device()], [4, 2], 0.0, search_of({4: refusal, 2: refusal}, []))


@pytest.mark.parametrize("end", [KeyboardInterrupt, plan_of(4, 900, INTERRUPTED)])
def test_an_interrupt_keeps_the_rows_so_far(end: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[int] = []
    found = rows_of([device(), device("b200")], [8, 4, 2], 0.0, search_of({8: plan_of(8, 800), 4: end}, tried))
    assert tried == [8, 4]
    status, table, _ = shown(capsys, found)
    assert status == 130 and [row[1] for row in table[1:]] == ["4", "8"]
    assert "INTERRUPTED" not in table[2] and "NOT" in table[1] and "NOT" not in table[2]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2T", 2 * 10**12), ("300b", 3 * 10**11), ("1.5M", 1_500_000), ("1e12", 10**12), ("1.2e3", 1200), ("7", 7)],
)
def test_tokens_have_units(text: str, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "T", "2TB", "2 T", "-1B", "0", "1.5", "nan", "inf", "1e99", "1e19", "2_000", "\u0662T", "9" * 99]
)
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of tokens, such as 300B, 2T or 1e12"):
        token_count(text)


def test_a_price_is_that_of_all_or_of_some_devices() -> None:
    assert prices("2.5") == {"": 2.5}
    assert prices("h100=2.5,b200=4") == {"h100": 2.5, "b200": 4.0}
    for wrong in ("2.5,4", "h100=2.5,4", "h100=", "h100=free", "0", "nan", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            prices(wrong)


def test_devices_have_their_prices_and_lack_what_stays_free() -> None:
    found = read_devices(options_of(*TABLE, "--device", "h100,b200", "--device", "h100", "--price", "h100=2.5"))
    assert [(one.name, one.price) for one in found] == [("h100", 2.5), ("b200", None)]
    assert found[1].machine.memory_gib == pytest.approx(0.95 * read_machine("b200").memory_gib)
    assert [one.price for one in read_devices(options_of(*TABLE, "--device", "h100,b200", "--price", "3"))] == [3.0, 3.0]
    assert [one.name for one in read_devices(options_of(*TABLE))] == ["h100"]
    with pytest.raises(UserError, match="--price a100=1: no such device is planned; name one of h100, b200"):
        read_devices(options_of(*TABLE, "--device", "h100,b200", "--price", "a100=1"))
    with pytest.raises(UserError, match="--device h900: no machine has this name"):
        read_devices(options_of(*TABLE, "--device", "h100,h900"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("small", "--model", "org/Name", "--seq-len", "8"), "--model org/Name: replaces the recipe small"),
        (("--model", "org/Name"), "--model org/Name: needs the length of sequences; add --seq-len L"),
        (("--model", "small", "--seq-len", "8"), "--model small: is a recipe; write `titan plan small` without --model"),
        (("small", "--seq-len", "8"), "--seq-len 8: belongs to --model; a recipe has its own; write --training.seq_len 8"),
        (("small", "--price", "2"), "--price: needs the length of the run; add --tokens T"),
        (("small", "--budget-hours", "2"), "--budget-hours: needs the length of the run; add --tokens T"),
        (("small", "--out", "new.toml"), "--out new.toml: holds one recipe, and a table plans several"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(given: Sequence[str], message: str) -> None:
    options = options_of(*TABLE, *given)
    with pytest.raises(UserError) as error:
        check_inputs(options, read_devices(options), ["small"])
    assert message in str(error.value)


def test_the_default_batch_has_four_million_tokens_and_the_odd_factor_of_the_devices() -> None:
    assert TOKENS_PER_STEP == 512 * 8192
    assert [default_batch(8192, gpus) for gpus in (1, 8, 4096)] == [512] * 3
    assert default_batch(8192, 96) == 3 * 128
    assert default_batch(6000, 8) == 512
    assert default_batch(2**23, 8) == 1
    assert default_batch(8192, 1022) == 511
