"""The device mesh of a job, with its views, and the meshes that data parallelism uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titan_core.api.parallel.mesh import MeshPlan, MeshView
from titan_core.api.plugins.errors import UserError
from titan_core.torch_private import concatenate_meshes, flatten_mesh, mesh_groups, unflatten_mesh


class JobMesh:
    """All process groups that a mesh plan needs. All ranks must construct it together.

    ``mesh["tp"]`` is a dimension and ``mesh["ep"]`` a view; both are device meshes of one dimension.
    """

    def __init__(self, plan: MeshPlan, device_type: str, host_tensors: bool = False) -> None:
        """
        Args:
            host_tensors: whether the groups must also work on CPU tensors if the device is not the CPU (CPU offload).
        """
        with mesh_groups(device_type, host_tensors):
            self._make(plan, device_type)

    def _make(self, plan: MeshPlan, device_type: str) -> None:
        # Dimensions of size 1 are omitted: each would cost a process group on every rank. FSDP's is always included, because
        # its mixed precision is useful at any degree.
        dims = {dim.name: plan.degrees[dim.name] for dim in plan.dims if dim.takes_rest or plan.degrees[dim.name] > 1}
        self.device_mesh = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        self._plan = plan
        self._dims = {name: self.device_mesh[name] for name in dims}
        self._joints: dict[str, DeviceMesh] = {}
        # Views and their remainders are made now and not on first use: all ranks must take part in making a group, and a
        # rank whose pipeline stage has no experts would never use the view.
        active = [view for view in plan.views if plan.view_degrees[view.name] > 1]
        for view in active:
            self._refold(view)
        self._data = {view.name: self._data_mesh(view) for view in active if view.shards_parameters}
        self._default_data = self._data_mesh(None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions, outermost first; then those of the views and their remainders."""
        return tuple(self._dims)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return one dimension or view, or several of them as a multi-dimensional mesh (``mesh["ep", "tp"]``).

        Raises:
            UserError: one of them is a view that borrows another.
        """
        if isinstance(names, str):
            return self._dims[names]
        for view in self._plan.views:
            if view.name in names and (both := [name for name in view.borrows if name in names]):
                why = f"borrows {both[0]!r}, so that nothing can be divided over both"
                fix = f"its author should leave out {both[0]!r} where the job's view borrows it"
                raise UserError.one(f"mesh view {view.name!r}", why, fix)
        return concatenate_meshes([self._dims[name] for name in names])

    def __contains__(self, name: object) -> bool:
        """Whether the job has the dimension or view ``name``; a dimension of size 1 usually is not there."""
        return name in self._dims

    def view_of(self, parameter: Tensor) -> str | None:
        """Return the view over which a transform has sharded ``parameter``, if any."""
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        return next((name for name in self._data if name in (names or ())), None)

    def data_mesh(self, view: str | None = None) -> DeviceMesh:
        """Return the ranks that see different data for a parameter and hold the same part of it. The mesh has one dimension,
        over which to shard, or two, the outer one to replicate over (as FSDP2's ``fully_shard`` expects).

        Args:
            view: the view over which the parameter is sharded (:meth:`view_of`), if any.
        """
        return self._default_data if view is None else self._data[view]

    def _refold(self, view: MeshView) -> None:
        borrowed = self._joined(view.borrows)
        degree = self._plan.view_degrees[view.name]
        sizes, names = (borrowed.size() // degree, degree), (view.remainder, view.name)
        folded = unflatten_mesh(borrowed, sizes, names)
        self._dims |= {name: folded[name] for name in names}

    def _data_mesh(self, view: MeshView | None) -> DeviceMesh:
        """Return the mesh to shard over, preceded by the dimension to replicate over, if any."""
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
        """Return a one-dimensional mesh of several dimensions, without those that the job does not have."""
        present = [name for name in names if name in self._dims]
        if len(present) == 1:
            return self._dims[present[0]]
        joint = "_".join(present)
        if joint not in self._joints:
            self._joints[joint] = flatten_mesh(concatenate_meshes([self._dims[name] for name in present]), joint)
        return self._joints[joint]
