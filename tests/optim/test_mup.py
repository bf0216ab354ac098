"""muP: initial values and learning rates by width, what they leave as it was, what is refused, and the coordinate check."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from titan_core.api import Computed, Constant, Ref, UserError, hookimpl
from titan_core.cli.main import main
from titan_optim import mup_check_command
from titan_optim.mup_check_command import Changes, picture
from titan_optim.mup_rules import WidthRule, WidthRules
from titan_testing.jobs import TINY, RunRecord, make_job, run_recipe

WIDE = "{dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 96%s}"
BASE = "{dim = 16, n_heads = 1, n_kv_heads = 1, ffn_dim = 32}"
MUP: dict[str, object] = {**TINY, "model.args": WIDE % "", "optimizer.name": "MuAdamW", "mup.base": BASE}

# Table 3 by hand: fan-ins are 4 times as wide as in the base model, or 3 times in the second feed-forward matrix.
RULES = {
    "tok_embeddings.weight": WidthRule(1.0, 1.0),
    "layers.0.attention.wq.weight": WidthRule(0.5, 0.25),
    "layers.1.attention.wk.weight": WidthRule(0.5, 0.25),
    "layers.1.attention.wo.weight": WidthRule(0.5, 0.25),
    "layers.0.feed_forward.w1.weight": WidthRule(0.5, 0.25),
    "layers.0.feed_forward.w2.weight": WidthRule((1 / 3) ** 0.5, 1 / 3),
    "layers.1.attention_norm.weight": WidthRule(1.0, 1.0),
    "norm.weight": WidthRule(1.0, 1.0),
    "output.weight": WidthRule(0.25, 0.25),
}


def base_of(**more: object) -> WidthRules:
    job = make_job("tiny", {**MUP, **more})
    return WidthRules.of(job, {"dim": 16, "n_heads": 1, "n_kv_heads": 1, "ffn_dim": 32})


def trained(**more: object) -> RunRecord:
    return run_recipe("tiny", {**MUP, **more}, weights=True)


def test_the_rules_are_those_of_the_paper(in_tmp: Path) -> None:
    base, shapes = base_of(), {name: tensor.shape for name, tensor in trained(**{"training.steps": 1}).initial.items()}
    assert {name: base.rule(name, shapes[name]) for name in RULES} == RULES


def test_initial_values_have_the_spread_of_their_width(in_tmp: Path) -> None:
    """That of the base model, whose output layer has its own: 16 ** -0.5."""
    wide = trained(**{"training.steps": 1}).initial
    base = trained(
        **{"training.steps": 1, "model.args": BASE.replace("}", ", n_layers = 2}"), "job.dump_folder": "base"}
    ).initial
    for name, rule in RULES.items():
        if wide[name].dim() == 1:
            assert wide[name].equal(torch.ones_like(wide[name]))
        else:
            assert wide[name].std().item() == pytest.approx(rule.std * base[name].std().item(), rel=0.1), name


def test_a_model_of_the_base_width_trains_as_without_mup(in_tmp: Path) -> None:
    mup = trained(**{"mup.base": WIDE % ""})
    standard = trained(**{"mup.base": "{}", "optimizer.name": "AdamW"})
    assert mup.losses == standard.losses
    assert all(tensor.equal(standard.final[name]) for name, tensor in mup.final.items())


class Groups:
    """An observer that keeps the optimizer's groups: rate and decay of each parameter."""

    def __init__(self) -> None:
        self.settings: dict[str, tuple[float, float]] = {}
        self.first = 0.0

    @hookimpl
    def titan_train_start(self, run: Any) -> None:
        names = {parameter: name for part in run.parts for name, parameter in part.named_parameters()}
        groups = run.state.optimizer.param_groups
        self.first = groups[0]["lr"]
        self.settings = {names[one]: (group["lr"], group["weight_decay"]) for group in groups for one in group["params"]}


def test_rates_follow_the_rules_and_decay_does_not_depend_on_widths(in_tmp: Path) -> None:
    observer = Groups()
    settings = {
        **MUP, "training.steps": 1, "lr_scheduler.warmup_steps": 1, "lr_scheduler.decay_ratio": 0.0, "optimizer.lr": 0.01,
        "optimizer.weight_decay": 0.2,
        "optimizer.param_groups": '[{pattern = "*w1*", lr_scale = 0.5}, {pattern = "*norm*", weight_decay = 0.0}]',
    }  # fmt: skip
    run_recipe("tiny", settings, observers=(observer,))
    for name, rule in RULES.items():
        rate = 0.01 * rule.lr * (0.5 if "w1" in name else 1.0)
        decay = 0.0 if "norm" in name else 0.2 / rule.lr
        assert observer.settings[name] == pytest.approx((rate, decay)), name
    assert observer.first == 0.01  # the one that is logged


def test_shapes_that_the_rules_do_not_know_are_refused() -> None:
    base = base_of()
    with pytest.raises(UserError, match=r"new.weight has shape \[3, 4\], and no in the base model"):
        base.rule("new.weight", torch.Size([3, 4]))
    base.shapes["layers.0.experts"] = torch.Size([4, 16, 32])  # type: ignore[index]
    assert base.rule("layers.0.experts", torch.Size([4, 64, 128])) == WidthRule(0.5, 0.25)
    for shape in ([4, 64, 96], [4, 64, 32], [8, 64, 128]):
        with pytest.raises(UserError, match="the widths of a stack must be two, in one proportion"):
            base.rule("layers.0.experts", torch.Size(shape))


def test_initial_values_that_cannot_be_scaled_are_refused() -> None:
    base, name = base_of(), "output.weight"
    shape = torch.Size([288, 64])
    for value in (Constant(1.0), Computed(Ref("nowhere:values"))):
        base.layout.parameters[name] = value  # type: ignore[index]
        with pytest.raises(UserError, match=r"initial value of output\.weight cannot be scaled by 0\.25"):
            base.initial_value(name, shape)
    base.layout.parameters[name] = Constant(0.0)  # type: ignore[index]
    assert base.initial_value(name, shape) == Constant(0.0)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another optimizer": ({"optimizer.name": "AdamW"}, "need optimizer.name = 'MuAdamW', not 'AdamW'"),
    "tied": ({"model.args": WIDE % ", tie_embeddings = true"}, "output.weight is tied to tok_embeddings.weight"),
    "no base": ({"mup.base": "{}"}, "has no base model, so it would be AdamW; set mup.base"),
    "unknown argument": ({"mup.base": "{width = 3}"}, "the model rejects it: width"),
    "another depth": ({"mup.base": BASE.replace("}", ", n_layers = 1}")}, "changes num_blocks from 2 to 1"),
    "wider heads": ({"mup.base": BASE.replace("n_heads = 1", "n_heads = 2", 1)}, "4 heads at width 64, and 2 at width 16"),
    "not positive": ({"mup.base": "{dim = 0}"}, "mup.base"),
}  # fmt: skip


@pytest.mark.quick_rows(3)
@pytest.mark.parametrize("case", REFUSED)
def test_settings_under_which_nothing_transfers_are_refused(in_tmp: Path, case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        trained(**settings)


@pytest.fixture
def logs() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


CHECK = [
    "mup", "check", "tiny", "--times", "1", "4", "--steps", "4",
    "--mup.base", "{dim = 32, n_heads = 2, n_kv_heads = 2, ffn_dim = 96}", "--model.args.n_layers", "2",
    "--training.seq_len", "32", "--training.local_batch_size", "4", "--training.global_batch_size", "4",
    "--job.device", "cpu", "--optimizer.lr", "4e-3",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("logs")
def test_the_coordinate_check(in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With muP, the activations of wide models change as those of narrow ones do; with the standard rules they do not."""
    assert main([*CHECK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(found["growth"]["muP"].values()) < 0.25
    assert found["growth"]["standard"]["layers.1"] > 0.7
    assert found["changes"]["muP"]["1"] == found["changes"]["standard"]["1"]  # the base model is the same
    drawing = ElementTree.parse("mup.svg").getroot()
    assert len(drawing.findall("{*}polyline")) == 2 * 4  # embedding, two blocks and logits, in two panels
    monkeypatch.setattr(mup_check_command, "MOST", -9.0)
    monkeypatch.setattr(mup_check_command, "_train", lambda *arguments: {"layers.0": 1.0 / (1 + arguments[2])})
    assert main(CHECK) == 1
    shown = capsys.readouterr().out
    assert "muP: change of  x 1  x 4  grows by width ^" in shown
    assert "activations change more in wide models (largest exponent -0.66" in shown


@pytest.mark.usefixtures("logs")
def test_a_check_that_shows_nothing_is_refused(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mup", "check", "tiny"]) == 2
    assert "mup.base = {}: is not set; name the arguments of the base model" in capsys.readouterr().err
    assert main([*CHECK, "--times", "2"]) == 2
    assert "--times: growth needs at least two widths" in capsys.readouterr().err
    Path("folder").mkdir()
    assert main([*CHECK, "--to", "folder"]) == 2
    assert "--to folder: cannot be written: Is a directory" in capsys.readouterr().err


def test_the_check_observes_without_a_trace(in_tmp: Path) -> None:
    plain = trained()
    changes = Changes()
    assert run_recipe("tiny", MUP, observers=(changes,)).losses == plain.losses
    assert 0 < changes.changes["tok_embeddings"] < 0.05  # its values are around 1


def test_names_are_no_markup() -> None:
    name = "<img src=x onerror=hit()>\"'&lt;]]></svg><script>hit()</script>"
    root = ElementTree.fromstring(picture({name: {1: {name: 1.0}, 2: {name: 2.0}}}))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "rect", "text", "polyline", "line"}
    assert [element.text for element in root.iter() if element.text and "img" in element.text] == [name, name]
