"""The context with which a component's code is called has the component's own section, for every kind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.distributions import write_distribution
from titan_testing.jobs import TINY, run_recipe

ROOT = Path(__file__).parents[2]

EVERY_KIND = """
from typing import ClassVar
from titan_core.api import (
    Checks, StepUse,
    Checkpoint,
    Dataset,
    Observer,
    LRSchedule,
    Observer,
    Objective,
    Optimizer,
    Phase,
    Ref,
    Section,
    Tokenizer,
    Transform,
    hookimpl,
)
api = (1, 0)

def section_of(kind):
    class Mine(Section):
        section: ClassVar[str] = "my_" + kind
        value: str = ""
    return Mine

SECTIONS = {kind: section_of(kind) for kind in
    ("transform", "objective", "debugger", "dataset", "tokenizer", "optimizer", "schedule", "checkpoint", "logger")}
CALLS = {}

def called(kind, function, context):
    assert type(context.section) is SECTIONS[kind], (kind, function, context.section)
    assert context.section.value == kind
    CALLS[kind, function] = type(context).__name__
    return context

def active(kind):
    return lambda context: bool(called(kind, "active", context))

def ref(name):
    return Ref("every_kind_code:" + name)

def named(kind):
    return dict(name="mine", summary="", config=SECTIONS[kind])

@hookimpl
def titan_parallelisms():
    return [Transform(**named("transform"), phase=Phase.DATA, active=active("transform"), check=ref("check_transform"),
        checks=Checks(model=ref("check_model"), hardware=ref("hardware")), apply=ref("apply"),
        steps=StepUse(observer=ref("observe")))]
@hookimpl
def titan_objectives():
    return [Objective(**named("objective"), check=ref("check_objective"), build=ref("objective"))]
@hookimpl
def titan_debuggers():
    return [Observer(**named("debugger"), active=active("debugger"), check=ref("check_debugger"), build=ref("debugger"))]
@hookimpl
def titan_datasets():
    return [Dataset(**named("dataset"), check=ref("check_dataset"), build=ref("dataset"))]
@hookimpl
def titan_tokenizers():
    return [Tokenizer(**named("tokenizer"), build=ref("tokenizer"))]
@hookimpl
def titan_optimizers():
    return [Optimizer(**named("optimizer"), build=ref("optimizer"))]
@hookimpl
def titan_lr_schedules():
    return [LRSchedule(**named("schedule"), check=ref("check_schedule"), build=ref("schedule"))]
@hookimpl
def titan_checkpoints():
    return [Checkpoint(**named("checkpoint"), active=active("checkpoint"), build=ref("checkpoint"))]
@hookimpl
def titan_metric_loggers():
    return [Observer(**{**named("logger"), "name": "my_logger"}, active=active("logger"), check=ref("check_logger"),
        build=ref("logger"))]
"""

CODE = """
import torch
from every_kind import called
from titan_core.data.byte_tokenizer import ByteTokenizer
from titan_core.data.stdlib import open_stdlib
from titan_core.model.next_token import NextToken

class Quiet:
    def restore(self): return False
    def after_step(self, last, requested): pass
    newest = None
    def before_update(self): pass
    def close(self): pass
    def log(self, record): pass

def check_transform(context): called("transform", "check", context); return []
def check_model(model, trial, context): called("transform", "check_model", context); return []
def hardware(context): called("transform", "hardware", context); return []
def apply(part, context): called("transform", "apply", context); return part
def observe(parts, context): called("transform", "observe", context); return object()
def check_objective(context): called("objective", "check", context); return []
def objective(context): called("objective", "build", context); return NextToken()
def check_debugger(context): called("debugger", "check", context); return []
def debugger(context): called("debugger", "build", context); return object()
def check_dataset(context): called("dataset", "check", context); return []
def dataset(context): return open_stdlib(called("dataset", "build", context))
def tokenizer(context): called("tokenizer", "build", context); return ByteTokenizer()
def optimizer(context):
    groups = called("optimizer", "build", context).groups
    return torch.optim.SGD([group.as_dict(0.1) for group in groups])
def check_schedule(context): called("schedule", "check", context); return []
def schedule(context):
    assert called("schedule", "build", context).steps == 1
    return torch.optim.lr_scheduler.ConstantLR(context.optimizer, 1.0)
def checkpoint(context): called("checkpoint", "build", context); return Quiet()
def check_logger(context): called("logger", "check", context); return []
def logger(context): called("logger", "build", context); return Quiet()
"""


def test_every_function_of_every_kind_receives_its_own_section(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(in_tmp / "site", "every-kind", EVERY_KIND)
    (in_tmp / "site" / "every_kind_code.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(in_tmp / "site"))
    for module in ("every_kind", "every_kind_code"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    kinds = ("transform", "objective", "debugger", "dataset", "tokenizer", "optimizer", "schedule", "checkpoint", "logger")
    chosen = ("objective.name", "training.dataset", "model.tokenizer", "optimizer.name", "lr_scheduler.name")
    own = {**{f"my_{kind}.value": kind for kind in kinds}, **dict.fromkeys(chosen, "mine")}
    run_recipe("tiny", {**TINY, "training.steps": 1, **own})
    assert sys.modules["every_kind"].CALLS == {
        ("transform", "active"): "JobContext",
        ("transform", "check"): "JobContext",
        ("transform", "check_model"): "TrainingContext",
        ("transform", "hardware"): "JobContext",
        ("transform", "apply"): "TrainingContext",
        ("transform", "observe"): "TrainingContext",
        ("objective", "check"): "JobContext",
        ("objective", "build"): "TrainingContext",
        ("debugger", "active"): "JobContext",
        ("debugger", "check"): "JobContext",
        ("debugger", "build"): "JobContext",
        ("dataset", "check"): "DatasetContext",
        ("dataset", "build"): "DatasetContext",
        ("tokenizer", "build"): "TokenizerContext",
        ("optimizer", "build"): "OptimizerContext",
        ("schedule", "check"): "JobContext",
        ("schedule", "build"): "LRScheduleContext",
        ("checkpoint", "active"): "JobContext",
        ("checkpoint", "build"): "CheckpointContext",
        ("logger", "active"): "JobContext",
        ("logger", "check"): "JobContext",
        ("logger", "build"): "JobContext",
    }
