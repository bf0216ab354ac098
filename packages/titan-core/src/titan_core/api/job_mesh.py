"""The device mesh of a job, with its views, and what data parallelism works on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titan_core.api.mesh import MeshPlan, MeshView
from titan_core.api.torch_private import concatenate_meshes, flatten_mesh, unflatten_mesh


class JobMesh:
    """Every process group that a mesh plan needs. To be made by all ranks at once.

    ``mesh["tp"]`` is a dimension, and ``mesh["ep"]`` a view; both are device meshes of one dimension.
    """

    def __init__(self, plan: MeshPlan, device_type: str) -> None:
        # Dimensions of size 1 are left out: each would cost a process group on every rank. dp_shard is always there, since
        # FSDP's mixed precision is wanted at any degree.
        dims = {name: degree for name, degree in plan.degrees.items() if degree > 1 or name == "dp_shard"}
        self.device_mesh = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        self._plan = plan
        self._dims = {name: self.device_mesh[name] for name in dims}
        self._joints: dict[str, DeviceMesh] = {}
        # Views and what remains of them are made now, and not where they are first used: all ranks must make a group, and
        # a rank whose pipeline stage has no expert would never ask for its view.
        active = [view for view in plan.views if plan.view_degrees[view.name] > 1]
        for view in active:
            self._refold(view)
        self._data = {view.name: self._data_mesh(view) for view in active}
        self._default_data = self._data_mesh(None)

    @property
    def names(self) -> tuple[str, ...]:
        """Every dimension larger than 1 and ``dp_shard``, outermost first; then the views and their remainders."""
        return tuple(self._dims)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """One dimension or view, or several as a mesh of as many dimensions (``mesh["ep", "tp"]``)."""
        if isinstance(names, str):
            return self._dims[names]
        return concatenate_meshes([self._dims[name] for name in names])

    def __contains__(self, name: object) -> bool:
        return name in self._dims

    def view_of(self, parameter: Tensor) -> str | None:
        """The view that a transform has divided ``parameter`` over, if any."""
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        return next((name for name in self._data if name in (names or ())), None)

    def data_mesh(self, view: str | None = None) -> DeviceMesh:
        """The ranks that see different data for a parameter and hold the same part of it: one dimension to shard over, or
        two, of which the outer one is to replicate over (as FSDP2's ``fully_shard`` takes them).

        Args:
            view: the view that the parameter is divided over (:meth:`view_of`), if any.
        """
        return self._default_data if view is None else self._data[view]

    def _refold(self, view: MeshView) -> None:
        borrowed = self._joined(view.borrows)
        degree = self._plan.view_degrees[view.name]
        sizes, names = (borrowed.size() // degree, degree), (view.remainder, view.name)
        folded = unflatten_mesh(borrowed, sizes, names)
        self._dims |= {name: folded[name] for name in names}

    def _data_mesh(self, view: MeshView | None) -> DeviceMesh:
        """Over which to shard, and before it over which to replicate."""
        groups = {how: list(self._plan.data_dims(how)) for how in ("shard", "replicate")}
        if view is not None:
            for names in groups.values():
                if view.borrows[0] in names:
                    names[names.index(view.borrows[0])] = view.remainder
            groups = {how: [name for name in names if name not in view.borrows] for how, names in groups.items()}
        shard = self._joined(groups["shard"])
        if not any(name in self._dims for name in groups["replicate"]):
            return shard
        return concatenate_meshes([self._joined(groups["replicate"]), shard])

    def _joined(self, names: Sequence[str]) -> DeviceMesh:
        """A mesh of one dimension of the ranks of several, leaving out what is not there."""
        present = [name for name in names if name in self._dims]
        if len(present) == 1:
            return self._dims[present[0]]
        joint = "_".join(present)
        if joint not in self._joints:
            self._joints[joint] = flatten_mesh(concatenate_meshes([self._dims[name] for name in present]), joint)
        return self._joints[joint]
