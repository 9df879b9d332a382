"""`mics explain FILE`: what a run is and what it will send, without a GPU and without ranks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mics_dtensor.errors import PlanError
from mics_dtensor.layout import Layout
from mics_dtensor.plan.presets import preset
from mics_dtensor.plan.presets.units import Policy, traffic_units
from mics_dtensor.plan.table import render
from mics_dtensor.plan.traffic import Options, Traffic, over_all_ranks, step_traffic
from mics_dtensor.train.config import RunConfig, config_keys
from mics_dtensor.train.degrees import num_loss_chunks, num_micro_steps, resolve
from mics_dtensor.train.key import value_at
from mics_dtensor.train.load import Run, load
from mics_dtensor.train.values import shown

SUMMARY = (
    "  explain FILE   the resolved configuration, where each value came from, and the messages"
)

ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The messages of a run: its layout, and the traffic beside that of plain FSDP."""

    layout: Layout
    num_parameters: int
    text: str
    traffic: Traffic
    plain_fsdp: Traffic


def run(argv: Sequence[str]) -> str:
    """What is printed. Raises MicsError."""
    parser = argparse.ArgumentParser(
        prog="mics explain",
        description=f"{SUMMARY.split(maxsplit=2)[2]}. Other arguments are overrides: "
        "--section.key value, in the file's names.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="TOML file of a run")
    parser.add_argument("--world-size", type=int, help="ranks in all (not given: no messages)")
    parser.add_argument("--ranks-per-node", type=int, help="as [mics] ranks_per_node")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--all", action="store_true", help="the defaults too")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options, overrides = parser.parse_known_args(list(argv))
    run = load(["--config-file", options.file, *overrides])
    plan, why_not = None, _WORLD_SIZE_WANTED
    if options.world_size is not None:
        run, layout = resolve(
            run, world_size=options.world_size, local_world_size=options.ranks_per_node
        )
        try:
            plan = plan_of(run.config, layout, num_micro_steps(run), backend=options.backend)
        except PlanError as error:
            why_not = str(error)
    if options.json:
        return json.dumps(_as_json(run, plan, why_not), indent=2)
    return "\n".join([*_configuration(run, everything=options.all), "", *_messages(plan, why_not)])


_WORLD_SIZE_WANTED = "give --world-size (and --ranks-per-node) for the messages"


def plan_of(config: RunConfig, layout: Layout, micro_steps: int, *, backend: Any) -> Plan:
    """The messages of a resolved run. Raises PlanError where they are not known beforehand."""
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
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        chunked_loss=num_loss_chunks(config) > 1,
    )
    units = traffic_units(model, layout, policy)
    options = Options(
        num_micro_steps=micro_steps, hierarchical=config.mics.hierarchical, backend=backend
    )
    topology = layout.topology
    plain_units = over_all_ranks(
        units, num_nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node
    )
    traffic, plain = step_traffic(units, options), step_traffic(plain_units, options)
    return Plan(layout, model.num_parameters, render(units, traffic, plain), traffic, plain)


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
        f"{plan.num_parameters:,} parameters on {nodes.num_nodes} nodes of {nodes.ranks_per_node} "
        f"ranks: {layout.num_replicas} replicas of {layout.partition_size} shards",
        plan.text,
    ]


def _as_json(run: Run, plan: Plan | None, why_not: str) -> dict[str, Any]:
    """Schema 1: file, keys (value, origin), inert, and plan, or why there is none."""
    keys = {
        name: {"value": value_at(run.config, name), "origin": run.origin[name]}
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
            "num_micro_steps": plan.traffic.num_micro_steps,
            "inter_node_bytes": plan.traffic.inter_node_bytes,
            "intra_node_bytes": plan.traffic.intra_node_bytes,
            "collectives": plan.traffic.collectives,
            "plain_fsdp_inter_node_bytes": plan.plain_fsdp.inter_node_bytes,
            "stages": [dataclasses.asdict(stage) for stage in plan.traffic.stages],
        }
    }
