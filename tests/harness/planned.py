"""Candidates of plans, and a composer that needs no simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from titan_core.api import MeshPlan, MeshView, UserError
from titan_core.api.parallel.mesh import STANDARD_DIMS
from titan_simulate.plan.candidates import Candidate
from titan_simulate.plan.compose import ANY, GIB, STATE, Composition, Worth
from titan_simulate.plan.kinds import Kind

VIEW = MeshView("ep", "x.ep", ("dp_shard", "cp"))
DIVIDED = ("parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree")


def mesh_of(ep: int = 1, **degrees: int) -> MeshPlan:
    """Return a mesh of Titan's dimensions; experts are divided over ``ep`` ranks of a view."""
    return MeshPlan(STANDARD_DIMS, {dim.name: degrees.get(dim.name, 1) for dim in STANDARD_DIMS}, (VIEW,), {"ep": ep})


def candidate_of(mesh: MeshPlan, batch: int = 1, microbatches: int = 4) -> Candidate:
    """Return a candidate on ``mesh``."""
    return Candidate({}, mesh, batch, microbatches, Kind((), ()))


@dataclass
class FakeComposer:
    """Composes candidates by a formula: recomputation takes time and saves memory, each division of a block costs something
    more than it saves, a pipeline idles, and replicas take memory."""

    world_size: int
    gib: float = 40.0
    """Activations of a sequence on all blocks, undivided, without recomputation."""
    traced: list[Kind] = field(default_factory=list)

    def trace(self, kinds: Mapping[Kind, MeshPlan], meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self.traced += kinds

    def failure(self, kind: Kind) -> UserError | str | None:
        return None

    def seconds(self, kind: Kind, batch: int, one_expert: bool = False) -> float:
        degrees, chosen = dict(kind.degrees), dict(kind.chosen)
        tensor, context = (degrees.get(key, 1) for key in DIVIDED)
        again = {"none": 0.0, "selective": 0.1, "full": 0.3}.get(chosen.get("activation_checkpoint.mode", "none"), 0.0)
        faster = 0.7 if chosen.get("float8.enable") else 1.0
        loss = 0.05 * math.log2(tensor) + 0.02 * math.log2(context)
        return (1.0 + again + loss) * faster / (tensor * context)

    def filled(self, kind: Kind, proved: bool = True) -> float:
        ranks = kind.ranks(DIVIDED)
        return self.gib * _kept(kind) / ranks / 79.0

    def least(self, candidate: Candidate, kind: Kind) -> tuple[float, float]:
        return 0.0, 0.0

    def composition(self, candidate: Candidate, kind: Kind | None = None, worth: Worth = ANY) -> Composition:
        """Return the same whatever kind it is derived from."""
        mesh, kind = candidate.mesh, candidate.kind
        degrees = dict(kind.degrees)
        ranks = math.prod(degrees.get(key, 1) for key in DIVIDED)
        idle = 0.0 if candidate.pipeline is None else candidate.pipeline.idle
        sequences = candidate.local_batch * candidate.microbatches
        pipelined = mesh.degree("pp")
        compute = self.seconds(kind, 1) * sequences / pipelined
        size = candidate.local_batch if candidate.pipeline is None else candidate.pipeline.microbatch_size
        memory = {
            STATE: 64.0 * GIB * mesh.degree("dp_replicate") / self.world_size,
            "activations": self.gib * GIB * _kept(kind) * size / ranks,
        }
        sent = 0.02 * mesh.degree("dp_replicate") / sequences
        return Composition(memory, {"compute": compute, "idle": compute * idle, "data parallelism": sent})


def _kept(kind: Kind) -> float:
    mode = str(dict(kind.chosen).get("activation_checkpoint.mode", "none"))
    return {"none": 1.0, "selective": 0.5, "full": 0.1}[mode]
