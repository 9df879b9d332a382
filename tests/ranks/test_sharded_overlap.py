"""Updated slices that still travel when step() has returned: whole before anybody needs them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.counting import count_collectives
from harness.late import hold_back
from harness.ranks import ranks
from harness.sharded import batch, equal_over, mesh_of, shard, stack, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from mics_dtensor import gradient_accumulation
from mics_dtensor.replicas import check_replicas
from mics_dtensor.sharded_states import ReplicaShardedOptimizer
from mics_dtensor.upstream import local_of, units_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def made(shape: tuple[int, ...] = (2, 2), **options: Any) -> tuple[Any, ReplicaShardedOptimizer]:
    masters = options.get("master_weights", "fp32")
    policy = {"mp_policy": BF16} if masters == "sharded" else {}
    model = shard(stack(9, depth=3), mesh_of(*shape), **policy)
    return model, ReplicaShardedOptimizer(
        model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False, **options
    )


def backwards(model: nn.Module, step: int, **options: Any) -> list[float]:
    losses = []
    with gradient_accumulation(model, num_micro_steps=2, **options) as accumulation:
        for micro in range(2):
            with accumulation.micro_step():
                loss = model(batch(step, micro, dist.get_rank(), width=9)).square().mean()
                loss.backward()
                losses.append(loss.item())
    return losses


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [local_of(p.detach()).clone() for p in model.parameters()]


@ranks(4, timeout_s=110)
def test_training_is_the_same_bit_for_bit_in_both_modes_and_with_an_early_boundary() -> None:
    for masters in ("fp32", "sharded"):
        for early in (False, True):
            model, optimizer = made(master_weights=masters)
            late, overlapped = made(master_weights=masters, overlap_update=True)
            for step in range(6):
                expected = backwards(model, step)
                assert backwards(late, step, overlap_boundary=early) == expected
                for each in (optimizer, overlapped):
                    each.step()
                    each.zero_grad()
            overlapped.wait()
            for mine, theirs in zip(locals_of(late), locals_of(model), strict=True):
                assert torch.equal(mine, theirs)


@ranks(4, timeout_s=110)
def test_it_is_whole_on_every_road() -> None:
    """Its forward, a prefetch, unshard(), state dicts, the next step, the check of replicas."""

    def prefetched(model: Any, _: Any) -> None:
        for here, there in zip(model.layers, model.layers[1:], strict=False):
            here.set_modules_to_forward_prefetch([there])
        model(batch(3, width=9))

    def unsharded(model: Any, _: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                handle = module.unshard(async_op=True)
                handle.wait()
        assert not any(p.isnan().any() for p in model.parameters())
        model.reshard()

    roads: dict[str, Callable[[Any, Any], object]] = {
        "forward": lambda model, _: model(batch(3, width=9)),
        "prefetch": prefetched,
        "unshard": unsharded,
        "state of the model": lambda model, _: model.state_dict(),
        "state of a layer": lambda model, _: [each.state_dict() for each in (*model.layers, model)],
        "DCP": lambda model, _: get_model_state_dict(model),
        "state of the optimizer": lambda _, optimizer: optimizer.state_dict(),
        "DCP of the optimizer": get_optimizer_state_dict,
        "step": lambda _, optimizer: [optimizer.step(), optimizer.wait()],
        "wait": lambda _, optimizer: optimizer.wait(),
        "check": lambda model, _: check_replicas(model),
    }
    for name, road in roads.items():
        with pytest.MonkeyPatch.context() as patch:
            hold_back(patch)
            model, optimizer = made(overlap_update=True)
            backwards(model, 0)
            optimizer.step()
            optimizer.zero_grad()
            assert any(t.isnan().any() for t in locals_of(model))
            road(model, optimizer)
            assert not any(t.isnan().any() for t in locals_of(model)), name
            assert not any("unshard" in vars(unit.group) for unit in units_of(model)), name


@ranks(2, timeout_s=110)
def test_loading_while_slices_travel_keeps_what_was_loaded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        hold_back(patch)
        model, optimizer = made((2, 1), overlap_update=True)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        backwards(model, 0)
        optimizer.step()
        model.load_state_dict(start)
        model(batch(1, width=9))
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter.detach()), whole(start[name])), name


@ranks(2, timeout_s=110)
def test_shards_that_move_while_slices_travel_get_them_where_they_are() -> None:
    with pytest.MonkeyPatch.context() as patch:
        hold_back(patch)
        (model, optimizer), (plain, other) = made((2, 1), overlap_update=True), made((2, 1))
        for step in range(2):  # the second staged: there is no room where they lie by then
            for each, its in ((model, optimizer), (plain, other)):
                backwards(each, step)
                its.step()
                its.zero_grad()
                each.to(torch.float64).to(torch.float32)
            assert any(t.isnan().any() for t in locals_of(model))
            model(batch(1, width=9))
            for mine, theirs in zip(locals_of(model), locals_of(plain), strict=True):
                assert torch.equal(mine, theirs)


@ranks(2, timeout_s=110)
def test_the_next_forward_is_told_what_to_wait_for() -> None:
    """set_post_optim_event after the step; after wait(), all that is queued by then."""
    model, optimizer = made((2, 1), overlap_update=True)
    told: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        set_event = type(model).set_post_optim_event
        patch.setattr(
            type(model),
            "set_post_optim_event",
            lambda self, event: (told.append(event), set_event(self, event)),
        )
        backwards(model, 0)
        told.clear()
        optimizer.step()
        assert told
        assert told[-1] is not None
        optimizer.wait()
        assert told[-1] is None


@ranks(4, timeout_s=110)
def test_a_slice_is_gathered_where_it_lies() -> None:
    """No message is staged, and FSDP2 gathers from the same storage; after a move it is."""
    mesh = mesh_of(2, 2)
    model, optimizer = made()
    for unit in (*model.layers, model.head):
        shards = [local_of(p) for p in unit.parameters() if local_of(p).numel()]
        for one, behind in pairwise(shards):
            assert one.data_ptr() + one.nbytes == behind.data_ptr()
    inner = [p for group in optimizer._inner.param_groups for p in group["params"]]
    assert not any(tensor._is_view() for tensor in inner)  # which would hold what it moved from
    backwards(model, 0)
    made_new: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        new_empty = torch.Tensor.new_empty
        patch.setattr(
            torch.Tensor,
            "new_empty",
            lambda *a, **k: (made_new.append(1), new_empty(*a, **k))[1],
        )
        with count_collectives() as counted:
            optimizer.step()
        assert counted.by_kind == {"all_gather": 4}
        assert not made_new
        model.to(torch.float64).to(torch.float32)
        optimizer.step()
        assert made_new
    assert equal_over(locals_of(model), mesh.get_group("replicate"))
