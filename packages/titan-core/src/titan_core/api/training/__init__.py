"""What does a step compute, and what updates the weights?

An objective returns the loss summed over the weighted targets; an optimizer is one of torch's, built from groups of
parameters::

    def build(context: OptimizerContext[LionSection]) -> Lion:
        return Lion([group.as_dict(context.section.lr) for group in context.groups], beta=context.section.beta)

* ``Objective``: the component that ``objective.name`` selects (hook ``titan_objectives``)
* ``Optimizer``: the component that ``optimizer.name`` selects (hook ``titan_optimizers``)
* ``LRSchedule``: the component that ``lr_scheduler.name`` selects (hook ``titan_lr_schedules``)
* ``ObjectiveFunction``: what ``Objective.build`` returns: logits, batch, vocabulary -> summed loss
* ``add_metric``: reports a metric of the objective, such as an accuracy
* ``Vocabulary``: arithmetic over a vocabulary that may be divided
* ``Batch``: tokens, targets, their weights, positions, documents, extra tensors
* ``Extra``: a named extra tensor of a batch, and whether its second dimension is the sequence
* ``BatchPlan``: how the global batch is divided over ranks and microbatches
* ``OptimizerContext``: what ``Optimizer.build`` receives, with the groups of parameters
* ``ParamGroup``: parameters with the same learning rate and weight decay
* ``TrainedParameter``: a parameter of a group: name, tensor, shape, role
* ``ParameterRole``: embedding, hidden matrix, hidden stack, head or vector
* ``SkipsOnDevice``: an optimizer that skips a bad step without the host
* ``LRScheduleContext``: what ``LRSchedule.build`` receives: the optimizer and the number of steps
* ``OptimizerSection``: the keys of ``[optimizer]`` that all optimizers share
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.config.sections import OptimizerSection as OptimizerSection
    from titan_core.api.plugins.job import BatchPlan as BatchPlan
    from titan_core.api.training.batch import Batch as Batch, Extra as Extra, ObjectiveFunction as ObjectiveFunction
    from titan_core.api.training.components import LRSchedule as LRSchedule, Objective as Objective, Optimizer as Optimizer
    from titan_core.api.training.metric import add_metric as add_metric
    from titan_core.api.training.optimizer import (
        LRScheduleContext as LRScheduleContext,
        OptimizerContext as OptimizerContext,
        ParameterRole as ParameterRole,
        ParamGroup as ParamGroup,
        SkipsOnDevice as SkipsOnDevice,
        TrainedParameter as TrainedParameter,
    )
    from titan_core.api.training.vocabulary import Vocabulary as Vocabulary
else:
    __getattr__ = getter(__name__, "training")
    __all__ = names_of("training")
