"""The norm is that of one process, whatever meshes the parameters are on."""

from itertools import product
from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from harness.ranks import ranks
from harness.sharded import Stack, batch, mesh_of, shard, stack, whole
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mics_dtensor import clip_grad_norm_
from mics_dtensor.clip import total_norm
from mics_dtensor.errors import ConfigError

NORMS = (1.0, 2.0, 3.0, inf)


class Wide(Stack):
    """Width 3 (fewer rows than four shards), and a layer that tensor parallel splits in two."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(width, 1)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.down(torch.tanh(self.up(x))))


def wide(*shape: int) -> nn.Module:
    """With gradients, the same in every world: every rank has the same data."""
    torch.manual_seed(3)
    model: nn.Module = Wide()
    if len(shape) == 3:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh_of(*shape)["tp"], plan)
    if shape:
        mesh = mesh_of(*shape)
        shard(model, mesh["replicate", "shard"] if len(shape) == 3 else mesh)
    (model(batch(0, width=3)).sum() * 10).backward()
    return model


def expect_one_process(*shape: int) -> None:
    model = wide(*shape)
    grads = [p.grad.clone() for p in model.parameters()]
    for norm_type, foreach in product(NORMS, (None, True, False)):
        for max_norm in (1e-3, 1.0, 1e6):
            reference = wide()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad.clone()
            ours = clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)
            case = (shape, norm_type, foreach, max_norm, ours, norm)
            assert ours.shape == (), case
            assert torch.allclose(ours, norm, rtol=1e-5), case
            theirs = dict(reference.named_parameters())
            for name, parameter in model.named_parameters():
                clipped, want = whole(parameter.grad), theirs[name].grad
                assert torch.allclose(clipped, want, rtol=1e-4, atol=1e-7), (case, name)


@ranks(4)
def test_norm_and_clipped_gradients_on_4_and_2x2_and_4x1() -> None:
    for shape in ((4,), (2, 2), (4, 1)):
        expect_one_process(*shape)


@ranks(8)
def test_mixed_parameters_on_2x2x2() -> None:
    expect_one_process(2, 2, 2)


@ranks(2)
def test_gradients_that_are_not_finite() -> None:
    model = shard(stack(), mesh_of(2))
    model(batch(0)).sum().backward()
    gradient = model.head.weight.grad.to_local()
    before = model.layers[0].linear.weight.grad.clone()
    for bad, rank, norm_type in product((inf, nan), (0, 1), (2.0, inf)):
        gradient[0, 0] = bad if dist.get_rank() == rank else 0.0
        with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} .* is {bad}"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        assert torch.equal(whole(before), whole(model.layers[0].linear.weight.grad))
        assert not torch.isfinite(total_norm(model.parameters(), norm_type=norm_type))
    assert not torch.isfinite(clip_grad_norm_(model.parameters(), 1.0))


@ranks(2)
def test_what_may_be_handed_in() -> None:
    model = shard(stack(), mesh_of(2))
    assert clip_grad_norm_(model.parameters(), 1.0) == 0.0  # no gradients at all
    assert clip_grad_norm_([], 1.0) == 0.0
    model(batch(0)).sum().backward()
    everything = clip_grad_norm_((p for p in model.parameters()), inf)
    assert torch.allclose(everything, clip_grad_norm_(list(model.parameters()), inf))
    one = model.head.weight
    alone = whole(one.grad).norm()
    assert torch.allclose(clip_grad_norm_(one, inf), alone)
    assert torch.allclose(clip_grad_norm_(one, 0.5), alone)  # the norm before
    assert torch.allclose(whole(one.grad).norm(), torch.tensor(0.5), rtol=1e-4)
    clip_grad_norm_(one, 0.0)
    assert whole(one.grad).norm() == 0.0
    model.head.weight.grad = None  # on every rank: the others are counted as before
    assert clip_grad_norm_(model.parameters(), inf) < everything
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="give a number above 0, or inf"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type)


@ranks(4)
def test_dtypes_and_placements_of_any_kind() -> None:
    """bf16 gradients have an fp32 norm, fp64 an fp64 one; a sum that is still pending is made."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(7)
    values = torch.randn(5, 3, dtype=torch.float64)
    for dtype, tolerance in ((torch.bfloat16, 1e-6), (torch.float64, 1e-14)):
        for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(),) * 2):
            parameter = nn.Parameter(distribute_tensor(values.to(dtype), mesh, placements))
            parameter.grad = distribute_tensor(values.to(dtype), mesh, placements)
            norm = total_norm([parameter])
            assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            want = values.to(dtype).double().norm()
            assert abs(norm.item() - want) < tolerance * want, (dtype, placements)
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([3.0, 4.0])
    pending = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, (Replicate(), Replicate())))
    part = torch.full((2,), 1.0 + dist.get_rank() % 2)  # 1 + 2 over the second axis
    pending.grad = DTensor.from_local(part, mesh, (Replicate(), Partial()))
    assert torch.allclose(total_norm([plain, pending]), torch.tensor(43.0).sqrt())
