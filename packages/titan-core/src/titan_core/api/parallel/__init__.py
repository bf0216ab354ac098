"""What is the mesh, and what may a transform change?

A parallelism or a precision is a transform: a function from a part of the model to that part, applied in a phase::

    Transform(name="zones", summary="...", config=ZonesSection, phase=Phase.DATA, mesh=MeshUse(dims=(ZONE,)),
              active=lambda context: context.job.mesh.degree("zone") > 1, apply=Ref("titan_zones.transform:apply"))

* ``Transform``: a change of the model
* ``Phase``: its place in the order
* ``MeshUse``: what a transform needs of the mesh
* ``Checks``: what it checks of the model and the machine
* ``StepUse``: what it does in and between steps
* ``Planning``: what ``titan plan`` and ``titan estimate`` may know of it
* ``DATA_DIMS``: all dimensions of data parallelism, in ``MeshUse.sums``
* ``Costs``: what a transform changes about memory and time
* ``PipelineCosts``: the same of a pipeline
* ``MeshDim``: a dimension, which multiplies the world
* ``MeshView``: another way to fold dimensions
* ``MeshPlan``: all of a job with their degrees
* ``JobMesh``: the process groups
* ``World``: the ranks, with their collectives
* ``ModelPart``: the modules of a rank
* ``Slot``: a declared place for values of other plugins
* ``ModelTrial``: the small copy of the model that a check may run
* ``ModuleCall``: one call in it
* ``Around``: what replaces a module's call in a trial
* ``Shares``: how a trial divides positions
* ``StepRunner``: how a step runs forward and backward
* ``StepInput``: its input
* ``StepAbandoned``: "start again"
* ``Microbatch``: the microbatch that is computed
* ``current_microbatch``: that microbatch, from inside the model
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
    from titan_core.api.parallel.planning import Costs as Costs, PipelineCosts as PipelineCosts
    from titan_core.api.parallel.slot import Slot as Slot
    from titan_core.api.parallel.step import StepAbandoned as StepAbandoned, StepInput as StepInput, StepRunner as StepRunner
    from titan_core.api.parallel.world import World as World
else:
    __getattr__ = getter(__name__, "parallel")
    __all__ = names_of("parallel")
