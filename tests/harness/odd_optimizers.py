"""Optimizers and schedules whose state is more than tensors with the shapes of the parameters."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from titan_core.api import LRScheduleContext, OptimizerContext, OptimizerSection, Ref
from titan_core.loop import training
from titan_testing.jobs import JobRecorder, RunRecord, make_job


class Odd(Optimizer):
    """Gradient descent whose steps depend on all of its state: a number and a nested table per parameter, a tensor that
    exists only after two steps, a value per group, a global value, and a value outside ``state``."""

    phase = 1.0

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "seen": 0, "factors": (1.0, 0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.phase *= 1.01
        total = self.state.setdefault("total", {"steps": 0})  # type: ignore[call-overload]
        total["steps"] += 1
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"count": 0, "scale": 1.0, "nested": {"means": [torch.zeros_like(parameter)], "pair": (1, 2.5)}}
                state["count"] += 1
                state["scale"] *= 0.9
                mean = state["nested"]["means"][0].lerp_(parameter.grad, 0.3)
                if state["count"] >= 2:
                    mean = mean + state.setdefault("late", torch.zeros_like(parameter)).add_(parameter.grad)
                size = group["lr"] * state["scale"] * state["nested"]["pair"][1] * group["factors"][1] * self.phase
                parameter.sub_(mean * (size * (1 + 0.1 * state["count"] + 0.01 * group["seen"] + 0.001 * total["steps"])))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "phase": self.phase}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.phase = state_dict["phase"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "phase"})


def build_odd(context: OptimizerContext[None]) -> Optimizer:
    lr = context.job.section(OptimizerSection).lr
    return Odd([group.as_dict(lr) for group in context.groups], lr)


class Secretive(torch.optim.SGD):
    """Has state that no checkpoint can store: an object, a tensor of partial sums, or another unsupported tensor."""

    kept: Any = object()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["secret"] = self.kept


def build_secretive(context: OptimizerContext[None]) -> Optimizer:
    lr = context.job.section(OptimizerSection).lr
    return Secretive([group.parameters[0].tensor for group in context.groups], lr)


def build_with_an_object_in_a_group(context: OptimizerContext[None]) -> Optimizer:
    lr = context.job.section(OptimizerSection).lr
    return Odd([{**group.as_dict(lr), "hook": print} for group in context.groups], lr)


def build_exponential(context: LRScheduleContext[None]) -> LRScheduler:
    """Build a schedule that computes each rate from the previous one, not from the step."""
    return ExponentialLR(context.optimizer, 0.7)


class _Bumpy:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


def build_bumpy(context: LRScheduleContext[None]) -> LRScheduler:
    """Build a schedule from a function with its own state."""
    return LambdaLR(context.optimizer, _Bumpy())


class WithObject(ExponentialLR):
    def __init__(self, optimizer: Optimizer) -> None:
        self.notes = object()
        super().__init__(optimizer, 0.9)


def build_with_an_object(context: LRScheduleContext[None]) -> LRScheduler:
    return WithObject(context.optimizer)


SETTINGS: dict[str, object] = {
    "model.args": "{dim = 32, n_layers = 2, n_heads = 2, n_kv_heads = 1, ffn_dim = 48}",
    "training.seq_len": 16,
    "training.local_batch_size": 1,
    "training.global_batch_size": 4,
    "training.steps": 6,
    "training.max_norm": 0.0,
    "optimizer.lr": 0.003,
    "checkpoint.enable": "true",
    "job.device": "cpu",
}


def train_in(
    folder: str, overrides: dict[str, object], optimizer: str | None = "build_odd", schedule: str | None = None
) -> RunRecord:
    os.chdir(folder)
    job = make_job("tiny", {**SETTINGS, **overrides})
    if optimizer is not None:
        job = dataclasses.replace(job, optimizer=dataclasses.replace(job.optimizer, build=Ref(f"{__name__}:{optimizer}")))
    if schedule is not None:
        job = dataclasses.replace(job, lr_schedule=dataclasses.replace(job.lr_schedule, build=Ref(f"{__name__}:{schedule}")))
    recorder = JobRecorder(weights=True)
    training.train(job, [recorder])
    return recorder.record
