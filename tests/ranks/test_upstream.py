"""A canary for every private name of torch in src/mics_dtensor/upstream: it exists and behaves.

Where one dies on a new release, the file behind the door is the only one to change.
"""

import io
import re
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._checkpointable as _checkpointable
import torch.distributed.checkpoint.state_dict as dcp_state
from harness.ranks import ranks
from harness.sharded import batch, mesh_of, shard, stack, whole
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives, _fsdp_common
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

UPSTREAM = Path(__file__).parents[2] / "src" / "mics_dtensor" / "upstream"
HAS_SEVERAL_GROUPS = hasattr(_fsdp_common, "ShardPlacementResult")  # torch >= 2.13


def state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def group_of(module: FSDPModule) -> Any:
    state = state_of(module)
    if HAS_SEVERAL_GROUPS:
        (group,) = state._fsdp_param_groups
        return group
    return state._fsdp_param_group


def _without_effect(*_: Any) -> None: ...


class Canaries:
    """Each method a canary, named after the private names that it stands for."""

    def __init__(self) -> None:
        self.model: Any = shard(stack(), mesh_of(2, 2), reshard_after_forward=True)
        self.layer = self.model.layers[0]
        self.group = group_of(self.layer)
        self.param = self.group.fsdp_params[0]

    def local_tensor(self) -> None:
        parameter = self.layer.linear.weight
        assert isinstance(parameter, DTensor)
        assert parameter._local_tensor.data_ptr() == parameter.to_local().data_ptr()

    def fsdp_params_sharded_param_unsharded_param_fqn(self) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        found = [names[id(p.sharded_param)] for p in self.group.fsdp_params]
        assert found == [f"layers.0.{name}" for name, _ in self.layer.named_parameters()]
        self.model(batch(0))  # the fully qualified names are set at the first forward
        assert [p._param_fqn for p in self.group.fsdp_params] == found
        self.layer.unshard()
        assert all(
            p._unsharded_param is q
            for p, q in zip(self.group.fsdp_params, self.layer.parameters(), strict=True)
        )
        self.layer.reshard()

    def module_info_reset_sharded_params(self) -> None:
        """A parameter that was replaced is taken up until FSDP2's first forward, then no more."""
        model = shard(stack(), mesh_of(1, 4), reshard_after_forward=2)
        group, linear = group_of(model.layers[0]), model.layers[0].linear
        linear.weight = nn.Parameter(linear.weight.detach().clone())
        places = [(p._module_info.module, p._module_info.param_name) for p in group.fsdp_params]
        param = group.fsdp_params[places.index((linear, "weight"))]
        assert param.sharded_param is not linear.weight
        assert group._reset_sharded_params is False
        assert group.is_sharded
        param.reset_sharded_param()
        assert param.sharded_param is linear.weight
        model(batch(0))
        assert group._reset_sharded_params is True
        assert param._sharded_post_forward_param is linear.weight  # cut to a smaller group

    def orig_size_padded_sharded_param_size_to_sharded_dtensor_placement(self) -> None:
        for p in self.group.fsdp_params:
            assert tuple(p._orig_size) == tuple(p.sharded_param.shape)
            assert p.padded_sharded_param_size[0] == -(-p._orig_size[0] // 2)
            assert p.fsdp_placement.dim == 0
            gradient = p.to_sharded_dtensor(torch.zeros_like(p.sharded_param._local_tensor))
            assert gradient.placements == p.sharded_param.placements
            assert gradient.shape == p.sharded_param.shape

    def post_accumulate_grad_hooks(self) -> None:
        """FSDP2 calls them after each reduction; torch keeps them in this attribute."""
        seen: list[torch.Tensor] = []
        parameter = self.layer.linear.weight
        assert not getattr(parameter, "_post_accumulate_grad_hooks", None)
        hook = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        assert len(parameter._post_accumulate_grad_hooks) == 1
        self.model(batch(0)).sum().backward()
        hook.remove()
        assert [tensor.shape for tensor in seen] == [parameter.shape]

    def unsharded_accumulated_grad_and_unsharded_param_grad(self) -> None:
        """Where a backward without gradient sync leaves its gradient."""
        self.model.set_requires_gradient_sync(False)
        self.model(batch(0)).sum().backward()
        assert not self.group.reduce_grads
        left = [
            p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None
            for p in self.group.fsdp_params
        ]
        assert all(left)
        self.model.set_requires_gradient_sync(True)
        assert self.group.reduce_grads

    def mesh_info_kinds_and_groups(self) -> None:
        info = self.group.mesh_info
        assert isinstance(info, _fsdp_common.HSDPMeshInfo)
        assert isinstance(info, _fsdp_common.FSDPMeshInfo)
        assert isinstance(info, _fsdp_common.DDPMeshInfo)
        assert isinstance(info, _fsdp_common.DataParallelMeshInfo)
        assert (info.replicate_mesh_dim, info.shard_mesh_dim) == (0, 1)
        assert dist.get_process_group_ranks(info.shard_process_group) == [
            dist.get_rank() // 2 * 2,
            dist.get_rank() // 2 * 2 + 1,
        ]
        assert info.replicate_process_group.size() == 2
        assert isinstance(info.mesh, DeviceMesh)
        plain = group_of(shard(stack(), mesh_of(4)).layers[0]).mesh_info
        assert not isinstance(plain, _fsdp_common.DDPMeshInfo)
        narrowed = _fsdp_common.FSDPMeshInfo(info.mesh, shard_mesh_dim=1)
        assert narrowed.shard_process_group is info.shard_process_group
        if HAS_SEVERAL_GROUPS:
            assert info.dp_mesh_dims is None
            assert info.spmd_mesh is None
            assert hasattr(info, "reduce_scatter_process_group")

    def mesh_info_decides_about_the_all_reduce(self) -> None:
        """The exchange: with a shard-only mesh_info the reduction stops in the partition group."""
        for of in self.model.modules():
            if isinstance(of, FSDPModule):
                info = group_of(of).mesh_info
                ours = _fsdp_common.FSDPMeshInfo(info.mesh, shard_mesh_dim=1)
                group_of(of).mesh_info = ours
                group_of(of).post_forward_mesh_info = ours
        self.model(batch(dist.get_rank())).sum().backward()
        mine = self.model.head.bias.grad._local_tensor
        alone = stack()
        for rank in (dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1):
            (alone(batch(rank)).sum() / 2).backward()
        assert torch.allclose(mine, alone.head.bias.grad.chunk(2)[dist.get_rank() % 2])
        assert len(self.model.head.bias.grad.placements) == 2

    def post_forward_mesh_info_auto_reshard_after_forward(self) -> None:
        assert self.group.post_forward_mesh_info == self.group.mesh_info
        kept = group_of(shard(stack(), mesh_of(2, 2), reshard_after_forward=False).layers[0])
        assert kept.post_forward_mesh_info is None
        default = shard(stack(), mesh_of(2, 2))
        assert state_of(default)._auto_reshard_after_forward
        assert not state_of(self.model)._auto_reshard_after_forward
        smaller = group_of(shard(stack(), mesh_of(1, 4), reshard_after_forward=2).layers[0])
        assert smaller.post_forward_mesh_info.shard_process_group.size() == 2
        assert callable(smaller.fsdp_params[0]._init_sharded_post_forward_param_metadata)

    def device_mp_policy_gradient_divide_factor(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = shard(stack(), mesh_of(2, 2), mp_policy=policy)
        group = group_of(model)
        assert group.device == torch.device("cpu")
        assert (group.mp_policy.param_dtype, group.mp_policy.reduce_dtype) == (
            torch.bfloat16,
            torch.float32,
        )
        assert group.gradient_divide_factor is None
        model.set_gradient_divide_factor(3.0)
        assert group.gradient_divide_factor == 3.0

    def partial_reduce_output_all_reduce_hook(self) -> None:
        assert self.group._partial_reduce_output is None
        self.model.set_requires_all_reduce(False)
        self.model(batch(0)).sum().backward()
        assert self.group._partial_reduce_output is not None
        assert self.group._all_reduce_hook is None
        self.layer.set_all_reduce_hook(lambda _: None)
        assert self.group._all_reduce_hook is not None

    def all_gather_comm_reduce_scatter_comm_defaults(self) -> None:
        """The attributes are what FSDP2 calls, and set_custom_all_gather sets them."""
        assert type(self.group._all_gather_comm) is _fsdp_collectives.DefaultAllGather
        assert type(self.group._reduce_scatter_comm) is _fsdp_collectives.DefaultReduceScatter
        assert issubclass(_fsdp_collectives.DefaultAllGather, _fsdp_api.AllGather)
        assert issubclass(_fsdp_collectives.DefaultReduceScatter, _fsdp_api.ReduceScatter)
        calls: list[str] = []

        class Told(_fsdp_collectives.DefaultAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                calls.append("gather")
                return super().__call__(*args, **kwargs)

        self.group._all_gather_comm = Told()
        self.model(batch(0)).sum().backward()
        assert calls == ["gather", "gather"]
        told = Told()
        self.layer.set_custom_all_gather(told)
        assert self.group._all_gather_comm is told

    def state_ctx_all_states_is_root(self) -> None:
        self.model(batch(0))
        context = state_of(self.model)._state_ctx
        assert context is state_of(self.layer)._state_ctx
        assert [state._is_root for state in context.all_states].count(True) == 1
        assert len(context.all_states) == 3

    def reset_iter_state(self) -> None:
        """After an exception in a forward the next step is a clean one (2.11: ours does it)."""
        from mics_dtensor.upstream import reset_after_exception, units_of

        def fail(*_: object) -> None:
            raise ValueError("in the forward")

        self.model(batch(5)).sum().backward()
        clean = [whole(p.grad) for p in self.model.parameters()]
        self.model.zero_grad()
        hook = self.model.head.register_forward_pre_hook(fail)
        try:
            self.model(batch(5))
        except ValueError:
            hook.remove()
        assert hasattr(state_of(self.model), "_reset_iter_state") == HAS_SEVERAL_GROUPS
        reset_after_exception(units_of(self.model))
        self.model(batch(5)).sum().backward()
        again = [whole(p.grad) for p in self.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))

    def comm_ctx_device_handle_and_training_states(self) -> None:
        """What the reset for torch 2.11 touches."""
        self.model(batch(0)).sum().backward()
        root = state_of(self.model)
        for name in ("all_gather_state", "reduce_scatter_state", "post_forward_order"):
            assert hasattr(root._comm_ctx, name) or HAS_SEVERAL_GROUPS, name
        assert root._device_handle.current_stream() is not None
        assert root._training_state == _fsdp_common.TrainingState.IDLE
        assert self.group._training_state == _fsdp_common.TrainingState.IDLE
        assert self.group._all_gather_result is None
        assert self.group._post_forward_indices == []
        assert not root._state_ctx.post_backward_final_callback_queued
        for name in ("_wait_for_post_backward", "_to_sharded", "_reshard_after_forward_event"):
            assert hasattr(self.group, name), name
        assert hasattr(root, "_modules_to_run_forward")
        assert hasattr(root._state_ctx, "iter_forward_root")

    def get_default_group_get_backend_options_timeout(self) -> None:
        world = dist.distributed_c10d._get_default_group()
        assert world is dist.group.WORLD
        group = dist.new_group(timeout=timedelta(seconds=17))
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=17)
        assert hasattr(dist, "set_timeout") or callable(dist.distributed_c10d._set_pg_timeout)

    def init_sharded_post_forward_param_metadata_is_dtensor(self) -> None:
        """`_init_sharded_post_forward_param_metadata` cuts as torch's own integer reshard does."""
        from mics_dtensor.upstream import reshard_after_forward_over, units_of

        def held(model: Any) -> list[tuple[int, ...]]:
            output = model(batch(0)).sum()
            shapes = [tuple(p.shape) for p in model.layers[0].parameters()]
            output.backward()
            return shapes

        model: Any = shard(stack(), mesh_of(1, 4))
        for unit in units_of(model):
            assert not any(p.fsdp.is_dtensor for p in unit.params)
            reshard_after_forward_over(unit, mesh_of(2, 2))
        assert held(model) == held(shard(stack(), mesh_of(1, 4), reshard_after_forward=2))

    def set_pg_timeout(self) -> None:
        """`_set_pg_timeout` of 2.11 and 2.13; 2.14 has it as dist.set_timeout."""
        from mics_dtensor.upstream import set_timeout

        group = dist.new_group(timeout=timedelta(seconds=17))
        set_timeout(timedelta(seconds=19), group)
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout == timedelta(seconds=19)

    def coalescing_manager(self) -> None:
        """Gloo has none, which is why collectives.py goes block by block there."""
        assert callable(dist.distributed_c10d._coalescing_manager)

    def foreach_mul_and_norm(self) -> None:
        tensors = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.ones(2)]
        torch._foreach_mul_(tensors, torch.tensor(0.5))
        assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [0.5] * 2]
        (norm,) = torch._foreach_norm([tensors[0]], 2.0, dtype=torch.float32)
        assert norm.dtype == torch.float32
        assert torch.isclose(norm, torch.tensor(3.0).sqrt())

    def sharding_spec_and_place_of_a_shard(self) -> None:
        """Of storage.py: a shard's mesh, and where it lies in the whole tensor."""
        weight = self.layer.linear.weight
        assert self.param._sharding_spec.mesh.shape == (2, 2)
        sizes, offsets = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        assert tuple(sizes) == tuple(weight._local_tensor.shape)
        assert tuple(offsets) == (dist.get_rank() % 2 * 3, 0)

    def partial_gradient_is_added_to_locally(self) -> None:
        """FSDP2 adds a whole gradient to the local part, then calls the hooks on the parameter."""
        bias = self.model.head.bias
        local = torch.ones_like(bias._local_tensor)
        spec = bias.placements
        bias.grad = DTensor.from_local(
            local, bias.device_mesh, [Partial(), *spec[1:]], shape=bias.shape, stride=(1,)
        )
        self.model(batch(0)).sum().backward()
        assert bias.grad.placements[0].is_partial()
        assert torch.equal(bias.grad._local_tensor, torch.full_like(local, 4.0))

    def orig_dtype_grad_dtype(self) -> None:
        """What FSDP2 rounds a reduced gradient to, and what may be stored beside a bf16 one."""
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model: Any = shard(stack().bfloat16(), mesh_of(2, 2), mp_policy=policy)
        model(batch(0).bfloat16())
        assert group_of(model)._orig_dtype == torch.bfloat16
        group_of(model)._orig_dtype = torch.float32
        shards = [param.sharded_param for param in group_of(model).fsdp_params]
        for parameter in shards:
            parameter.grad_dtype = None
        model(batch(0).bfloat16()).sum().backward()
        assert {p.grad._local_tensor.dtype for p in shards} == {torch.float32}
        assert {p.dtype for p in shards} == {torch.bfloat16}

    def optimizer_load_state_dict_hooks(self) -> None:
        """_optimizer_load_state_dict_pre_hooks and _optimizer_load_state_dict_post_hooks."""
        optimizer = torch.optim.SGD(self.model.parameters())
        optimizer.register_load_state_dict_pre_hook(lambda _, state: state)
        optimizer.register_load_state_dict_post_hook(lambda _: None)
        assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
        assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1

    def make_wrapper_subclass_and_to_copy(self) -> None:
        """A piece is copied as savers copy: _to_copy, detach, clone. DCP's hooks are on it."""
        from mics_dtensor.upstream import Piece

        piece = torch.Tensor._make_wrapper_subclass(Piece, (4, 3), dtype=torch.float32)
        assert piece.shape == (4, 3)
        piece = Piece.of(torch.arange(4.0), (4, 3), [((1, 1), (1, 2)), ((2, 0), (1, 2))])
        copy = piece.detach().clone().to(torch.bfloat16)
        assert isinstance(copy, Piece)
        assert copy.flat.dtype == torch.bfloat16
        assert copy.boxes == piece.boxes
        assert isinstance(piece, _checkpointable._Checkpointable)

    def checkpoint_wrapper(self) -> None:
        """torch.distributed.algorithms._checkpoint: the block is the wrapper's one child."""
        from mics_dtensor.upstream.wrapper import CheckpointWrapper

        block = torch.nn.Linear(2, 2)
        wrapper: Any = CheckpointWrapper(block, preserve_rng_state=True, early_stop=False)
        assert list(wrapper.children()) == [block]
        assert [name for name, _ in wrapper.named_parameters()] == ["weight", "bias"]

    def is_profiler_enabled(self) -> None:
        """_is_profiler_enabled is on in torch.profiler alone."""
        from torch.profiler import ProfilerActivity, profile

        assert not torch.autograd.profiler._is_profiler_enabled
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):  # 2.11 warns without
            assert torch.autograd.profiler._is_profiler_enabled
        assert not torch.autograd.profiler._is_profiler_enabled

    def sharded_param_data_end_to_end(self) -> None:
        """`_sharded_param_data` is what FSDP2 gathers, also after its lazy init; padding is not."""
        from mics_dtensor.upstream import lay_end_to_end, lies_end_to_end, units_of

        def results(*, moved: bool) -> list[torch.Tensor]:
            model: Any = shard(stack(), mesh_of(2, 2))
            rooms = {}
            for unit in units_of(model) if moved else []:
                rooms[unit] = lay_end_to_end(unit.params, least_numel=0)
                assert rooms[unit] is not None
            found = [model(batch(0))]
            found[0].sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            found.append(model(batch(0)))
            model.reshard()
            copied = deepcopy(model.state_dict())  # what torch cannot do where a storage is shared
            assert all(torch.equal(whole(p), whole(copied[n])) for n, p in model.named_parameters())
            for unit, room in rooms.items():
                assert lies_end_to_end(unit.params, room)
                room.fill_(0.5)
            if moved:
                assert all((whole(p) == 0.5).all() for p in model.parameters())
                model.to(torch.bfloat16)
                assert not any(lies_end_to_end(u.params, room) for u, room in rooms.items())
            return found

        for mine, theirs in zip(results(moved=True), results(moved=False), strict=True):
            assert torch.equal(mine, theirs)

    def apply_of_some_parameters_and_version(self) -> None:
        """`_apply` is what module.to() calls, with the parameters themselves; `_version` counts."""
        from mics_dtensor.upstream import narrow_parameters, version_of

        bias, weight = self.layer.linear.bias, self.layer.linear.weight
        narrow_parameters([self.model], [bias], torch.bfloat16)
        assert self.layer.linear.bias is bias
        assert (bias.dtype, weight.dtype) == (torch.bfloat16, torch.float32)
        assert self.param.sharded_param.dtype == torch.float32
        tensor = torch.zeros(4)
        before = version_of(tensor)
        tensor[1:3].view(2, 1).copy_(torch.ones(2, 1))
        assert version_of(tensor) == before + 1
        assert tensor._version == version_of(tensor)

    def unshard_is_looked_up_on_the_group(self) -> None:
        """Forward, prefetch and unshard() all call `group.unshard`, with `async_op` alone."""
        from mics_dtensor.upstream import before_unshard, units_of

        self.model.layers[0].set_modules_to_forward_prefetch([self.model.layers[1]])
        calls: list[str] = []
        undo = [before_unshard(u, lambda u=u: calls.append(u.name)) for u in units_of(self.model)]
        self.model(batch(0))
        assert calls[:3] == ["(root)", "layers.0", "layers.1"]
        calls.clear()
        self.layer.unshard(async_op=True).wait()
        assert calls == ["layers.0"]
        for each in undo:
            each()
        assert "unshard" not in vars(self.group)
        assert callable(self.group.comm_ctx.get_all_gather_streams)
        assert hasattr(self.group.device_handle, "stream")
        assert callable(self.model.set_post_optim_event)

    def state_dict_hooks_and_whose_they_are(self) -> None:
        """`_state_dict_hooks` holds functions, partials too, of both kinds of registration."""
        from mics_dtensor.upstream import rewrites_state_dict

        assert not rewrites_state_dict(self.layer)
        handles = [
            self.layer._register_state_dict_hook(partial(torch.nn.functional.relu)),
            self.layer.register_state_dict_post_hook(partial(_without_effect)),
        ]
        assert list(self.layer._state_dict_hooks)[-1] == handles[1].id
        assert rewrites_state_dict(self.layer)
        handles[1].remove()
        assert not rewrites_state_dict(checkpoint_wrapper.checkpoint_wrapper(self.layer))

    def state_dict_info_of_full_state(self) -> None:
        """`_StateDictInfo` stands as `info` in the frames of torch's state dict functions."""
        from mics_dtensor.upstream import full_state_is_asked

        asked: list[bool] = []
        self.model.register_state_dict_pre_hook(lambda *_: asked.append(full_state_is_asked()))
        for full in (True, False):
            options = dcp_state.StateDictOptions(full_state_dict=full)
            dcp_state.get_model_state_dict(self.model, options=options)
            optimizer = torch.optim.SGD(self.model.parameters())
            optimizer.register_state_dict_pre_hook(lambda _: asked.append(full_state_is_asked()))
            dcp_state.get_optimizer_state_dict(self.model, optimizer, options=options)
        self.model.state_dict()
        assert asked == [True, True, False, False, False]
        assert dcp_state._StateDictInfo.__module__ == dcp_state.__name__

    def storage_info(self) -> None:
        """checkpoint.filesystem._StorageInfo says where a value lies in a file."""
        from mics_dtensor.upstream import storage_info

        info = storage_info("__0_0.distcp", 3, 5)
        assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 3, 5)
        assert info.transform_descriptors is None

    def a_saved_tensor_where_it_lies(self) -> None:
        """PyTorchFileReader.get_record_offset, and skip_data while loading."""
        from mics_dtensor.upstream import tensor_in_place

        for value in (torch.randn(3, 4).t(), torch.arange(6)[2:4], torch.tensor(1.5).bfloat16()):
            written = io.BytesIO()
            torch.save(value, written)
            view = memoryview(bytearray(written.getvalue()))
            found = tensor_in_place(written, view)
            assert found is not None
            assert torch.equal(found, value)
            assert found.stride() == value.stride()
            found.zero_()
            assert torch.equal(torch.load(io.BytesIO(view)), torch.zeros_like(value))
        shifted = memoryview(bytearray(1 + len(view)))[1:]
        shifted[:] = view
        assert tensor_in_place(written, shifted) is None

    def fake_store_of_testing_internal(self) -> None:
        """torch.testing._internal.distributed.fake_pg: importing it registers the backend."""
        from mics_dtensor.upstream.tracing import fake_store

        assert isinstance(fake_store(), dist.Store)
        assert "fake" in dist.Backend.backend_list

    def fake_tensors_and_memory_tracker(self) -> None:
        """torch._subclasses.fake_tensor and torch.distributed._tools.fsdp2_mem_tracker."""
        from mics_dtensor.upstream.tracing import fake_tensors, memory_tracker

        with fake_tensors():
            large = torch.empty(2**40)  # no storage: it would not fit
            assert (large + 1).shape == large.shape
        tracker = memory_tracker(self.model, torch.optim.SGD(self.model.parameters()))
        assert callable(tracker.get_tracker_snapshot)


@ranks(4, timeout_s=100)
def test_every_canary_lives() -> None:
    died = []
    for name in [name for name in vars(Canaries) if not name.startswith("_")]:
        try:
            getattr(Canaries(), name)()
        except (AssertionError, AttributeError, TypeError) as error:
            died.append(f"{name} (torch {torch.__version__}): {error!r}")
    assert not died, "\n".join(died)


def test_every_private_name_has_a_canary() -> None:
    """Read from the sources: a name that is added there is missed here."""
    canaries = Path(__file__).read_text()
    ours = {"_reset_iter_state_2_11", "_without_replicas", "_copy_reduce_scatter_group"}
    ours |= {"_parameter_name", "_unit", "_state"}
    for file in UPSTREAM.glob("*.py"):
        used = set(re.findall(r"(?<=\.)_[a-z]\w*", file.read_text()))
        missing = sorted(name for name in used - ours if name not in canaries)
        assert not missing, (file.name, missing)
