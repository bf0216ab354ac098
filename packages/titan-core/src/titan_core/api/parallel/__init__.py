"""What is the mesh, and what may a transform change?

A parallelism or a precision is a transform: a function from a part of the model to that part, applied in a phase::

    Transform(name="zones", summary="...", config=ZonesSection, phase=Phase.DATA, mesh=MeshUse(dims=(ZONE,)),
              active=lambda context: context.job.mesh.degree("zone") > 1, apply=Ref("titan_zones.transform:apply"))

* ``Transform``: a change of the model before training (hook ``titan_parallelisms`` or ``titan_precisions``)
* ``Phase``: the phases in which transforms are applied, in order
* ``MeshUse``: the dimensions and views that a transform adds, and those over which it sums gradients
* ``Checks``: how a transform refuses a model or a machine
* ``StepUse``: what a transform does in a step, or between steps
* ``Planning``: what ``titan plan`` may try, and ``titan estimate`` must add, for a transform
* ``DATA_DIMS``: value in ``MeshUse.sums``: all dimensions of data parallelism
* ``Costs``: what a transform changes about memory and time
* ``PipelineCosts``: what a pipeline changes about them
* ``OptimizerCosts``: what an optimizer says of itself
* ``MeshDim``: a dimension of the mesh; multiplies the number of ranks
* ``MeshView``: another way to fold dimensions of the mesh; needs no additional ranks
* ``MeshPlan``: the dimensions and views of a job with their sizes, free of torch
* ``JobMesh``: the process groups of a job: ``context.mesh["tp"]``
* ``World``: all ranks of a job, with the few collectives that plugins need
* ``ModelPart``: what ``Transform.apply`` receives and returns: a rank's modules, layout, objective
* ``Slot``: a named place in which other plugins leave values about modules
* ``ModelTrial``: a small copy of the model, which ``Checks.model`` may run
* ``ModuleCall``: a call of a module in a trial
* ``Around``: what replaces a module's call in a trial
* ``Shares``: how a trial divides positions
* ``StepRunner``: how a step runs forward and backward
* ``StepInput``: what a ``StepRunner`` receives: the microbatches of a step
* ``StepAbandoned``: a step runner raises it to make the trainer start the step again
* ``Microbatch``: a microbatch of a step, with the seed and the step of its random draws
* ``current_microbatch``: returns the microbatch that the model computes, from inside a module
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_core.api._lazy import getter, names_of

if TYPE_CHECKING:
    from titan_core.api.parallel.components import (
        DATA_DIMS as DATA_DIMS,
        Checks as Checks,
        MeshUse as MeshUse,
        Phase as Phase,
        Planning as Planning,
        StepUse as StepUse,
        Transform as Transform,
    )
    from titan_core.api.parallel.job_mesh import JobMesh as JobMesh
    from titan_core.api.parallel.mesh import MeshDim as MeshDim, MeshPlan as MeshPlan, MeshView as MeshView
    from titan_core.api.parallel.microbatch import Microbatch as Microbatch, current_microbatch as current_microbatch
    from titan_core.api.parallel.model_part import ModelPart as ModelPart
    from titan_core.api.parallel.model_trial import (
        Around as Around,
        ModelTrial as ModelTrial,
        ModuleCall as ModuleCall,
        Shares as Shares,
    )
    from titan_core.api.parallel.planning import (
        Costs as Costs,
        OptimizerCosts as OptimizerCosts,
        PipelineCosts as PipelineCosts,
    )
    from titan_core.api.parallel.step import StepAbandoned as StepAbandoned, StepInput as StepInput, StepRunner as StepRunner
    from titan_core.api.parallel.world import World as World
    from titan_core.api.plugins.component import Slot as Slot
else:
    __getattr__ = getter(__name__, "parallel")
    __all__ = names_of("parallel")
