"""All uses of private torch API in titan-core, checked with torch 2.11 to 2.15. A torch upgrade changes only this file.

* ``DeviceMesh._concatenate``, ``DeviceMesh._flatten``, ``DeviceMesh._unflatten``: torch can reshape and join meshes that
  share their process groups only through these methods.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of ``meshes``, which are slices of one mesh, in their order."""
    return DeviceMesh._concatenate(list(meshes))


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of one dimension, called ``name``, over the ranks of ``mesh``."""
    return mesh._flatten(name)


def unflattened(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the first dimension of ``mesh`` split into dimensions of ``sizes``, outermost first, called ``names``."""
    return mesh._unflatten(0, sizes, names)
