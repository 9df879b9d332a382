"""What FSDP2 hands the two stages: divide factors, mixed dtypes, extension types."""

import types
from typing import Any

import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.ranks import ranks
from harness.sharded import batch, every_unit, mesh_of, shard, stack, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mics_dtensor import apply_mics
from mics_dtensor.topology import Topology

TOPOLOGY = Topology.uniform(world_size=8, ranks_per_node=2)


def gradients(model: nn.Module, width: int = 5) -> list[torch.Tensor]:
    model(batch(dist.get_rank(), width=width)).sum().backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


@ranks(8, timeout_s=100)
def test_every_divide_factor_scales_once() -> None:
    """Hazards 2.9: None, 1, 2, 300 and the shard size; forced sums, AVG, bf16 and fp32."""
    alone = stack()
    for rank in range(8):
        alone(batch(rank)).sum().backward()
    total = [parameter.grad for parameter in alone.parameters()]
    for partition_size in (4, 8):  # two replicas on two nodes each; one on four
        for factor in (None, 1.0, 2.0, 300.0, float(partition_size)):
            forced = (True,) if factor in (1.0, 2.0, 300.0) else (True, False)  # no PREMUL on gloo
            for force_sum in forced:
                model = shard(stack(), mesh_of(8 // partition_size, partition_size))
                apply_mics(model, topology=TOPOLOGY)
                if factor is not None:
                    every_unit(model, lambda u, f=factor: u.set_gradient_divide_factor(f))
                every_unit(model, lambda u, s=force_sum: u.set_force_sum_reduction_for_comms(s))
                case = (partition_size, factor, force_sum)
                for ours, summed in zip(gradients(model), total, strict=True):
                    want = summed / (factor or 8.0)
                    assert torch.allclose(ours, want, rtol=1e-5, atol=1e-6), case


@ranks(8)
def test_reductions_in_bf16_and_fp16() -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = shard(stack(), mesh_of(1, 8), mp_policy=policy)
        apply_mics(model, topology=TOPOLOGY)
        flat = gradients(shard(stack(), mesh_of(1, 8)))
        for ours, theirs in zip(gradients(model), flat, strict=True):
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(5, 7), nn.Linear(7, 3)
        self.narrow.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)).bfloat16()).float()


@ranks(4)
def test_mixed_dtypes_travel_as_bytes() -> None:
    """Hazards 2.3: one message of uint8 in each of both stages."""
    torch.manual_seed(0)
    model = fully_shard(Mixed(), mesh=mesh_of(1, 4))
    apply_mics(model, topology=Topology.uniform(world_size=4, ranks_per_node=2))
    torch.manual_seed(0)
    alone, data = Mixed(), batch(1)
    with count_collectives() as counted:
        output = model(data)
    assert torch.equal(output, alone(data))
    assert (counted.num("all_to_all"), counted.num("all_gather")) == (1, 1)
    fp32, bf16 = 2 * 5 + 2, 7 + 1  # elements of a shard, rows padded to 8 and 4
    rank = dist.get_rank()
    across = counted.message_bytes("all_to_all", ranks=(rank % 2, rank % 2 + 2))
    assert across == 2 * (4 * fp32 + 2 * bf16)


def split(
    self: torch.Tensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], None]:
    """fsdp_pre_all_gather: a number goes as a coarse bf16 one and what is left of it, in fp32."""
    del mesh, outer_size, outer_stride, module, mp_policy  # FSDP2 wants this very signature
    coarse = self.detach().bfloat16()
    return (coarse, self.detach() - coarse), None


def join(
    _: torch.Tensor,
    gathered: tuple[torch.Tensor, ...],
    __: None,
    ___: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    """fsdp_post_all_gather."""
    coarse, rest = gathered
    if out is None:
        return coarse.float() + rest, (coarse, rest)
    out.data.copy_(coarse.float() + rest)  # autograd is not to see it
    return None


@ranks(4)
def test_an_extension_type_goes_through_both_stages() -> None:
    """Hazards 2.14: it gathers two tensors of two dtypes at once."""
    model: Any = shard(stack(8, out=8), mesh_of(1, 4))
    for parameter in model.parameters():
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = types.MethodType(split, local)
        local.fsdp_post_all_gather = types.MethodType(join, local)
    apply_mics(model, topology=Topology.uniform(world_size=4, ranks_per_node=2))
    plain = shard(stack(8, out=8), mesh_of(1, 4))
    for _ in range(2):
        ours, theirs = gradients(model, width=8), gradients(plain, width=8)
        assert all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True)
        )
        model.zero_grad()
        plain.zero_grad()
