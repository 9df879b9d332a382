"""Tensor parallel in the plan against torchtitan's own model, in a world of no other ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch
from harness.ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig
from torchtitan.config.configs import CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from mics_dtensor import Topology, explain
from mics_dtensor.cli.plan import run
from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.shape import shape_of
from mics_dtensor.plan.tensor_parallel import unit_messages
from mics_dtensor.plan.traffic import step_traffic
from mics_dtensor.train import device_shim
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.model import model_spec
from mics_dtensor.train.traced_cut import loss_of, plan_cut
from mics_dtensor.train.tracing import fake_world, sharded

FILE = Path(__file__).parents[2] / "train_configs" / "llama3_8b_2x8.toml"


def config_of(model: str, flavor: str, degree: int, num_layers: int | None = None) -> RunConfig:
    config = replace_at(replace_at(RunConfig(), "model.name", model), "model.flavor", flavor)
    config = replace_at(config, "model.n_layers", num_layers)
    return replace_at(config, "parallelism.tensor_parallel_degree", degree)


def parallelized(config: RunConfig, layout: Layout) -> Any:
    """By torchtitan's own `parallelize` for the model, on the mesh that its trainer makes."""
    device_shim.use_device("cpu")
    spec, degree = model_spec(config), layout.tensor_parallel_size
    plan_cut(spec, degree)
    with torch.device("meta"):
        model = spec.model.build()
    if spec.model.enable_weight_tying:
        model.tok_embeddings.weight = model.lm_head.weight
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.num_replicas,
        data_parallel_shard_degree=layout.partition_size,
        tensor_parallel_degree=degree,
        spmd_backend="partial_dtensor",
    )
    world = layout.topology.world_size
    return spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, world),
        training=TrainingConfig(),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )


FLAVORS = [
    ("llama3", "debugmodel", 2, 4),
    ("llama3", "debugmodel", 16, 2),
    ("llama3", "8B", 2, 8),
    ("llama3", "70B", 8, 4),
    ("qwen3", "8B", 2, 1),
    ("qwen3", "32B", 8, 2),
    ("llama3", "1B", 2, 2),
    ("qwen3", "0.6B", 2, 2),
]


@pytest.mark.parametrize(("model", "flavor", "degree", "size"), FLAVORS)
@ranks(1, torchrun=True)  # a process of its own: what `use_device` does to torchtitan stays there
def test_the_units_of_a_preset_are_those_of_the_model(
    model: str, flavor: str, degree: int, size: int
) -> None:
    """Shapes, groups and bytes of every stage: as `explain` reads torchtitan's own model."""
    config = config_of(model, flavor, degree, 2 if flavor != "debugmodel" else None)
    shapes = preset(model, flavor)
    shapes = shapes if flavor == "debugmodel" else shapes.with_layers(2)
    topology = Topology.uniform(world_size=2 * size * degree, ranks_per_node=degree * min(size, 2))
    layout = Layout(topology=topology, partition_size=size, tensor_parallel_size=degree)
    ours = traffic_units(shapes, layout, Policy(chunked_loss=False))
    with fake_world(topology.world_size):
        told = explain(parallelized(config, layout), num_micro_steps=2, topology=topology)
    theirs = {unit.name: unit for unit in told.units}
    assert len(theirs) == sum(unit.count for unit in ours)
    for unit in ours:
        first = unit.name.replace("*", "0").split(", ")
        (its,) = [u for name, u in theirs.items() if set(first) <= set(name.split(", "))]
        assert sorted(its.shapes) == sorted(unit.shapes)
        assert (its.shard, its.replicate, its.gathers) == (unit.shard, unit.replicate, unit.gathers)
    options = Options(num_micro_steps=2, hierarchical=False)
    traffic = step_traffic(ours, options)
    assert traffic.inter_node_bytes == told.inter_node_bytes
    assert traffic.intra_node_bytes == told.intra_node_bytes


@pytest.mark.parametrize(("model", "flavor"), [("llama3", "1B"), ("qwen3", "0.6B")])
def test_two_tables_of_one_are_not_planned(model: str, flavor: str) -> None:
    argv = ["--config-file", str(FILE), "--cluster", "p5", "--nodes", "2"]
    argv += ["--model.name", model, "--model.flavor", flavor]
    argv += ["--parallelism.tensor_parallel_degree", "2"]
    with pytest.raises(PlanError, match="one table for embedding and head"):
        run(argv)


class Counts(TorchDispatchMode):
    """Functional collectives, which are those of tensor parallel, by kind and bytes in all."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = {
            "all_gather_into_tensor": "all_gather",
            "reduce_scatter_tensor": "reduce_scatter",
            "all_reduce": "all_reduce",
        }.get(func.__name__.partition(".")[0])
        if kind and func.namespace == "_c10d_functional":
            ranks = self._ranks if kind == "all_gather" else 1
            self.seen[kind, ranks * args[0].nbytes] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("checkpointing", ["none", "op", "2", "full"])
@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_t9_messages_are_those_that_torchtitan_sends(
    model: str, checkpointing: Any, chunks: int
) -> None:
    degree, batch, length = 4, 2, 64
    config = config_of(model, "debugmodel", degree)
    layers = shape_of(preset(model, "debugmodel")).num_layers
    topology = Topology.uniform(world_size=2 * degree, ranks_per_node=2 * degree)
    layout = Layout(topology=topology, partition_size=2, tensor_parallel_size=degree)
    tokens = torch.zeros((batch, length), dtype=torch.int64)
    place = torch.arange(length).expand(batch, -1)
    with fake_world(2 * degree):
        its = sharded(
            config,
            num_layers=layers,
            partition_size=2,
            checkpointing=checkpointing,
            policy=Policy(),
        )
        its.to_empty(device="cpu")
        with Counts(degree) as counts:
            if chunks == 1:
                loss = loss_of(its, degree)(tokens, place)
            else:
                wrapper: Any = ChunkedLossWrapper.Config(
                    num_chunks=chunks, loss_fn=CrossEntropyLoss.Config()
                ).build()
                wrapper.lm_head, its._skip_lm_head = its.lm_head, True
                loss, _ = wrapper(its(tokens, place), tokens, torch.tensor(1.0))
            loss.backward()
    ours: Counter[tuple[str, int]] = Counter()
    for unit in traffic_units(preset(model, "debugmodel"), layout, Policy()):
        for message in unit_messages(
            unit,
            shape_of(preset(model, "debugmodel")),
            tokens=batch * length,
            checkpointing=checkpointing,
            num_loss_chunks=chunks,
        ):
            total = unit.count * message.count
            assert total == int(total)
            ours[message.collective, message.size_bytes] += int(total)
    assert ours == counts.seen


def test_a_world_leaves_no_groups_behind() -> None:
    """DTensor remembers layouts by mesh, and the next world's mesh is equal to the last one's."""
    for number in range(3):
        with fake_world(8 + 8 * number):
            its = sharded(
                config_of("llama3", "debugmodel", 4),
                num_layers=1,
                partition_size=2,
                checkpointing="none",
                policy=Policy(),
            )
            its.to_empty(device="cpu")
            tokens = torch.zeros((1, 8), dtype=torch.int64)
            loss_of(its, 4)(tokens, torch.arange(8)[None]).backward()
