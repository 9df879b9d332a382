"""`mics explain FILE`: what a run is and what it will send, without a GPU and without ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.layout import Layout
from mics_dtensor.plan.comparison import Comparison
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.train.config import RunConfig, config_keys
from mics_dtensor.train.degrees import num_micro_steps, resolve
from mics_dtensor.train.key import value_at
from mics_dtensor.train.known import refuse_unknown
from mics_dtensor.train.load import Run, load
from mics_dtensor.train.loss_chunks import num_loss_chunks
from mics_dtensor.train.planning import contradiction, shard_itemsize
from mics_dtensor.train.preset_limits import refuse_by_preset
from mics_dtensor.train.values import LISTS, counted, shown

SUMMARY = (
    "  explain FILE   the resolved configuration, where each value came from, and the messages"
)

ITEMSIZE = {"bfloat16": 2, "float32": 4}


GPUS_OF_A_SERVER = 8


@dataclasses.dataclass(frozen=True)
class World:
    """The ranks that are explained, and what had to be assumed about them."""

    size: int
    ranks_per_node: int
    assumptions: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig, size: int | None, ranks_per_node: int | None) -> World:
        """As given; else the smallest world that the file can mean, with two replicas to meet.

        Raises ConfigError for what can be no world, and for one that the file contradicts.
        """
        for option, given in (("--world-size", size), ("--ranks-per-node", ranks_per_node)):
            if given is not None and given < 1:
                raise ConfigError(f"{option} {given}; give 1 or more")
        assumed = []
        said = config.mics.ranks_per_node
        if said is not None and ranks_per_node not in (None, said):
            raise ConfigError(contradiction(said, ranks_per_node))
        node = ranks_per_node if said is None else said
        if node is None:
            node = min(GPUS_OF_A_SERVER, size or GPUS_OF_A_SERVER)
            assumed.append(f"assumed: {counted(node, 'rank')} on a node (--ranks-per-node)")
        if size is None:
            size = _smallest_world(config, node)
            assumed.append(f"assumed: {counted(size, 'rank')} in all (--world-size)")
        return cls(size, node, tuple(assumed))


def _smallest_world(config: RunConfig, ranks_per_node: int) -> int:
    degrees = config.parallelism
    model = degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree
    shards = config.mics.partition_size
    if isinstance(shards, int):
        copy = shards * model
    elif degrees.data_parallel_shard_degree > 0:
        copy = degrees.data_parallel_shard_degree * degrees.context_parallel_degree * model
    else:
        copy = max(2 * ranks_per_node, degrees.context_parallel_degree * model)  # over two nodes
    replicas = degrees.data_parallel_replicate_degree
    if replicas < 1 or (replicas == 1 and shards is not None):
        replicas = 2
    return math.lcm(copy * replicas, ranks_per_node)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The messages of a run: its layout, and the traffic beside that of plain FSDP."""

    layout: Layout
    num_parameters: int
    sent: Comparison


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    parser = argparse.ArgumentParser(
        prog="mics explain",
        description=f"{SUMMARY.split(maxsplit=2)[2]}. Other arguments are overrides: "
        f"--section.key value, in the file's names; lists are written {LISTS}.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="TOML file of a run")
    parser.add_argument("--world-size", type=int, help="ranks in all (not given: see the output)")
    parser.add_argument("--ranks-per-node", type=int, help="as [mics] ranks_per_node")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--all", action="store_true", help="the defaults too")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options, overrides = parser.parse_known_args(list(argv))
    run = load(["--config-file", options.file, *overrides])
    refuse_unknown(run.config)
    world = World.of(run.config, options.world_size, options.ranks_per_node)
    run, layout = resolve(run, world_size=world.size, local_world_size=world.ranks_per_node)
    plan, why_not = None, ""
    try:
        plan = plan_of(run.config, layout, num_micro_steps(run), backend=options.backend)
    except PlanError as error:
        why_not = str(error)
    if options.json:
        return json.dumps(_as_json(run, plan, why_not), indent=2, allow_nan=False)
    told = [*_configuration(run, everything=options.all), "", *world.assumptions, *run.planned]
    return "\n".join([*told, *_messages(plan, why_not)])


def plan_of(config: RunConfig, layout: Layout, micro_steps: int, *, backend: Any) -> Plan:
    """The messages of a resolved run. Raises PlanError where they are not known beforehand, and
    ConfigError for what the program would refuse.
    """
    refuse_by_preset(config)
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1:
        raise PlanError("the messages of pipeline stages are not planned yet; the run prints them")
    if parallelism.expert_parallel_degree > 1:
        raise PlanError("the messages of expert parallel are not planned yet; the run prints them")
    model = preset(config.model.name, config.model.flavor)
    if config.model.n_layers is not None:
        model = model.with_layers(config.model.n_layers)
    policy = Policy(
        gather_itemsize=ITEMSIZE[config.training.mixed_precision_param],
        reduce_itemsize=ITEMSIZE[config.training.mixed_precision_reduce],
        hop_itemsize=ITEMSIZE[
            config.mics.second_hop_dtype or config.training.mixed_precision_reduce
        ],
        update_itemsize=shard_itemsize(config) if config.mics.optimizer_over_replicas else None,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        node_local_backward=config.mics.node_local_backward,
        chunked_loss=num_loss_chunks(config) > 1,
    )
    options = Options(
        num_micro_steps=micro_steps,
        hierarchical=config.mics.hierarchical,
        two_hop=layout.num_replicas > 1,
        bucket_size_bytes=config.mics.bucket_size_bytes,
        overlap_update=config.mics.overlap_update,
        backend=backend,
    )
    topology = layout.topology
    units = tuple(traffic_units(model, layout, policy))
    sent = Comparison(units, options, topology.num_nodes, topology.ranks_per_node)
    return Plan(layout, model.num_parameters, sent)


def _configuration(run: Run, *, everything: bool) -> list[str]:
    """Every value that is not a default (or every value), by table, with where it came from."""
    lines = [f"# {run.path}"]
    table = ""
    for name in config_keys():
        if run.origin[name] == "default" and not everything:
            continue
        here, _, last = name.rpartition(".")
        if here != table:
            lines += ["", f"[{here}]"]
            table = here
        said = f"{last} = {shown(value_at(run.config, name))}"
        lines.append(f"{said:<48}  # {run.origin[name]}")
    if not everything:
        lines += ["", "all other keys have their defaults (--all shows them)"]
    if run.inert:
        lines += ["", "accepted, and without effect:", *(f"  {line}" for line in run.inert)]
    return lines


def _messages(plan: Plan | None, why_not: str) -> list[str]:
    if plan is None:
        return [f"messages: {why_not}"]
    layout = plan.layout
    nodes = layout.topology
    return [
        f"{plan.num_parameters:,} parameters on {counted(nodes.num_nodes, 'node')} of "
        f"{counted(nodes.ranks_per_node, 'rank')}: {counted(layout.num_replicas, 'replica')} of "
        f"{counted(layout.partition_size, 'shard')}",
        str(plan.sent),
    ]


def _in_json(value: Any) -> Any:
    """The value; "inf", "-inf" or "nan" for a number that JSON has not."""
    if isinstance(value, dict):
        return {name: _in_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _as_json(run: Run, plan: Plan | None, why_not: str) -> dict[str, Any]:
    """Schema 1: file, keys (value, origin), inert, and plan, or why there is none."""
    keys = {
        name: {"value": _in_json(value_at(run.config, name)), "origin": run.origin[name]}
        for name in config_keys()
    }
    told: dict[str, Any] = {"schema": 1, "file": str(run.path), "keys": keys, "inert": run.inert}
    if plan is None:
        return told | {"plan": None, "no_plan": why_not}
    layout, topology = plan.layout, plan.layout.topology
    return told | {
        "plan": {
            "num_parameters": plan.num_parameters,
            "world_size": topology.world_size,
            "ranks_per_node": topology.ranks_per_node,
            "partition_size": layout.partition_size,
            "tensor_parallel_size": layout.tensor_parallel_size,
            "num_replicas": layout.num_replicas,
            "num_micro_steps": plan.sent.options.num_micro_steps,
            "inter_node_bytes": plan.sent.inter_node_bytes,
            "intra_node_bytes": plan.sent.intra_node_bytes,
            "collectives": plan.sent.collectives,
            "adam_bytes_per_rank": plan.sent.adam_bytes,
            "plain_hsdp_inter_node_bytes": plan.sent.plain_hsdp.inter_node_bytes,
            "plain_fsdp_inter_node_bytes": plan.sent.plain_fsdp.inter_node_bytes,
            "stages": [dataclasses.asdict(stage) for stage in plan.sent.traffic.stages],
        }
    }
