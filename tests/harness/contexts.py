"""Build contexts for components that are built outside a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from titan_core.api import (
    JobContext,
    LRScheduleContext,
    OptimizerContext,
    OptimizerSection,
    ParameterRole,
    ParamGroup,
    TokenizerContext,
    TrainedParameter,
)
from titan_core.api.config.sections import LRSchedulerSection
from titan_core.api.training.optimizer import is_vector, param_groups

NO_JOB: Any = None


def job_context(section: Any = None) -> JobContext[Any]:
    """Return the context of a component that does not use its job."""
    return JobContext(section=section, job=NO_JOB)


def tokenizer_at(path: object) -> TokenizerContext[Any]:
    return TokenizerContext(str(path), section=None)


def grouped(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> list[ParamGroup]:
    """Return the groups of parameters without a model. Each parameter is a vector or a hidden matrix."""
    return param_groups(
        (
            TrainedParameter(
                name, parameter, ParameterRole.VECTOR if is_vector(name, parameter) else ParameterRole.HIDDEN_MATRIX
            )
            for name, parameter in named
        ),
        section,
    )


def optimizer_context(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> OptimizerContext[Any]:
    return OptimizerContext(
        section=section, job=NO_JOB, mesh=NO_JOB, device=torch.device("cpu"), groups=grouped(named, section)
    )


def schedule_context(optimizer: torch.optim.Optimizer, section: LRSchedulerSection, steps: int) -> LRScheduleContext[Any]:
    return LRScheduleContext(section=section, job=NO_JOB, optimizer=optimizer, steps=steps)
