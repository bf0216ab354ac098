"""The mesh that data parallelism works on."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension that FSDP shards over, or two where HSDP replicates over the first. Ranks that share a sequence
    (context parallelism) hold the same weights and different gradients, as ranks with different sequences do: sharding goes
    over them too."""
    names = mesh.mesh_dim_names or ()
    # Flattening and joining meshes is private still; the same in torch 2.11 to 2.15.
    shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp") if "cp" in names else mesh["dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shard]) if "dp_replicate" in names else shard
