"""One FSDP2 parameter group, as the rest of the library sees it: a Unit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.tensor import DTensor

from mics_dtensor.upstream.parameter import ShardedParameter

MeshInfo = DataParallelMeshInfo
ORIGINAL = "mics_original"  # our attribute, on mesh_info objects of our making


@dataclass(eq=False)
class Unit:
    """One FSDP2 parameter group. Two units are equal only if they are the same object."""

    name: str
    part: int  # which of the model parts handed in (pipeline stages) it belongs to
    is_outermost: bool  # no other unit's module contains it: FSDP2 makes it a root
    group: Any  # torch's FSDPParamGroup
    state: Any  # torch's FSDPState of its module
    params: list[ShardedParameter] = field(default_factory=list)

    @property
    def mesh_info(self) -> MeshInfo:
        """Torch's description of the group's mesh, the original one also while it is exchanged."""
        info: MeshInfo = original_of(self.group.mesh_info)
        return info

    @property
    def mesh(self) -> DeviceMesh:
        """The data-parallel mesh that FSDP2 uses: (replicate, shard), (shard,) or (replicate,)."""
        mesh: DeviceMesh = self.mesh_info.mesh
        return mesh

    @property
    def device(self) -> torch.device:
        """Where the unit computes and communicates; its shards are elsewhere under CPU offload."""
        device: torch.device = self.group.device
        return device

    @property
    def root_id(self) -> int:
        """Equal for units of one FSDP root once it has run; they share their streams."""
        return id(self.state._state_ctx)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The partition group, or None where nothing is sharded (`replicate()`)."""
        info = self.mesh_info
        return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The replication group, or None where there is none."""
        info = self.mesh_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    @property
    def num_replicas(self) -> int:
        """Ranks of the replication group."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @property
    def num_shards(self) -> int:
        """Ranks of the partition group."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def mesh_axes(self) -> tuple[int | None, int | None]:
        """Positions of the replicate and the shard axis in `mesh`."""
        info = self.mesh_info
        return info.replicate_mesh_dim, info.shard_mesh_dim

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype in which parameters are gathered."""
        return self.group.mp_policy.param_dtype or self.params[0].parameter.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which gradients cross the wire."""
        return self.group.mp_policy.reduce_dtype or self.gather_dtype

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the backward gathers again. A root that was not told otherwise does not."""
        automatic_root = self.state._auto_reshard_after_forward and self.is_outermost
        return self.group.post_forward_mesh_info is not None and not automatic_root

    @property
    def regather_group(self) -> dist.ProcessGroup | None:
        """The smaller group that gathers in the backward (integer reshard_after_forward)."""
        info = original_of(self.group.post_forward_mesh_info)
        if not self.reshards_after_forward or not isinstance(info, FSDPMeshInfo):
            return None
        group = info.shard_process_group
        whole = self.shard_group
        return group if whole is not None and group.size() < whole.size() else None

    @property
    def divide_factor(self) -> float | None:
        """The factor of set_gradient_divide_factor; None is the mean over data-parallel ranks."""
        factor: float | None = self.group.gradient_divide_factor
        return factor

    @property
    def reduces_gradients(self) -> bool:
        """False after set_requires_gradient_sync(False)."""
        return bool(self.group.reduce_grads)

    @property
    def reduces_unused_parameters(self) -> bool:
        """Whether the user wants zeros in place of None (set_reduce_scatter_unused_params)."""
        return bool(getattr(self.group, "reduce_scatter_unused_params", False))  # torch >= 2.13

    @property
    def has_pending_partial_sum(self) -> bool:
        """Whether FSDP2's own deferral (set_requires_all_reduce) holds a sum for later."""
        return self.group._partial_reduce_output is not None

    @property
    def has_all_reduce_hook(self) -> bool:
        """Whether set_all_reduce_hook was used."""
        return self.group._all_reduce_hook is not None

    @property
    def all_gather(self) -> AllGather:
        """The collective that gathers the unit. Set per group: a module may have several (MoE)."""
        comm: AllGather = self.group._all_gather_comm
        return comm

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """The collective that reduces its gradients."""
        comm: ReduceScatter = self.group._reduce_scatter_comm
        return comm

    @property
    def has_default_collectives(self) -> bool:
        """Whether both collectives are torch's plain ones: exchanging them loses nothing."""
        return (
            type(self.all_gather) is DefaultAllGather
            and type(self.reduce_scatter) is DefaultReduceScatter
        )

    def set_collectives(self, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
        """Install both. FSDPModule.set_custom_all_gather does this, but refuses several groups."""
        self.group._all_gather_comm = all_gather
        self.group._reduce_scatter_comm = reduce_scatter


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, the very object; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def units_of(model: nn.Module | Iterable[nn.Module]) -> list[Unit]:
    """The units of a model, or of model parts, in the order of `named_modules`; each once.

    Before the first forward FSDP2 takes up parameters that were put in the place of those that
    fully_shard saw (transformers loads so); it is made to do so now, where it still would.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    units: dict[int, Unit] = {}
    for part, root in enumerate(parts):
        outer: list[str] = []  # prefixes of the modules under an FSDP module
        for name, module in root.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            state = module._get_fsdp_state()
            outermost = not any(name.startswith(prefix) for prefix in outer)
            for group in groups_of(state):
                _take_up_replaced(group)
                if id(group) in units:  # fully_shard([norm, head]): one group, two modules
                    units[id(group)].name += f", {name}"
                else:
                    units[id(group)] = Unit(name, part, outermost, group, state)
            outer.append(f"{name}." if name else "")
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        for unit in units.values():
            if unit.part == part:
                unit.params = [
                    ShardedParameter(_parameter_name(p, names), p) for p in unit.group.fsdp_params
                ]
    for unit in units.values():
        unit.name = unit.name or "(root)"
    return list(units.values())


def original_of(info: Any) -> Any:
    """The mesh_info that was exchanged for `info`, or `info` itself."""
    return getattr(info, ORIGINAL, info)


def groups_of(state: Any) -> list[Any]:
    """The FSDPParamGroups of an FSDPState."""
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.13: several with per-parameter meshes
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _take_up_replaced(group: Any) -> None:
    if getattr(group, "_reset_sharded_params", True) or not group.is_sharded:
        return  # FSDP2 has done it
    for param in (ShardedParameter("", its) for its in group.fsdp_params):
        if isinstance(param.shown, DTensor) and id(param.shown) != id(param.parameter):
            param.fsdp.reset_sharded_param()


def _parameter_name(fsdp_param: Any, names: dict[int, str]) -> str:
    its = ShardedParameter("", fsdp_param)
    for parameter in (*its.forms, its.shown):
        if id(parameter) in names:
            return names[id(parameter)]
    return fsdp_param._param_fqn or "(unregistered parameter)"
