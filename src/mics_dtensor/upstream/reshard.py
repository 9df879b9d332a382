"""Resharding to a smaller group after the forward, over a mesh that exists already."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from mics_dtensor.upstream.units import Unit


def reshard_after_forward_over(unit: Unit, mesh: DeviceMesh) -> None:
    """What fully_shard(reshard_after_forward=n) does, over the last axis of a 2-D `mesh`.

    torch's own makes a mesh and its groups anew for every unit, and hangs where fully_shard's mesh
    does not hold every rank. No communication.
    """
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    unit.group.post_forward_mesh_info = info
    for param in unit.params:
        param.fsdp.post_forward_mesh_info = info
        # Only its shape is read, to cut it into what a rank holds between forward and backward.
        whole = torch.empty(param.shape, device="meta")
        param.fsdp._init_sharded_post_forward_param_metadata(whole)


def can_reshard_over_smaller_group(unit: Unit) -> bool:
    """Whether torch can: not for parameters that were DTensors before fully_shard."""
    return not any(param.fsdp.is_dtensor for param in unit.params)
