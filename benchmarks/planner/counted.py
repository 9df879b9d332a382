"""The planner's bytes against those that the kernel counted on the emulated cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.planner.published import Case
from mics_dtensor.layout import Layout
from mics_dtensor.plan.options import Options
from mics_dtensor.plan.traffic import Traffic, step_traffic
from mics_dtensor.plan.unit import Unit
from mics_dtensor.topology import Topology

RESULTS = Path(__file__).parents[1] / "results"


def linears_traffic(run: dict[str, Any], row: dict[str, Any]) -> Traffic:
    """A step of the stack of linear layers as `benchmarks/systems.py` shards it, on gloo."""
    unit = linears_unit(run, row)
    options = Options(
        num_micro_steps=row["micro_steps"],
        hierarchical=row["system"] == "mics",
        two_hop=unit.replicate.size > 1,
        backend="gloo",
    )
    return step_traffic([unit], options)


def linears_unit(run: dict[str, Any], row: dict[str, Any]) -> Unit:
    """Its layers, as they are sharded."""
    node = run["ranks_per_node"]
    topology = Topology.uniform(world_size=run["num_nodes"] * node, ranks_per_node=node)
    size = round(row["partition_nodes"] * node)
    layout = Layout(topology=topology, partition_size=size)
    dim = run["workload"]["dim"]
    return Unit(
        name="layers",
        count=run["workload"]["num_layers"],
        shapes=((dim, dim),),
        shard=layout.shard_shape,
        replicate=layout.replicate_shape,
        gathers=2,
        gather_itemsize=4,
        reduce_itemsize=4,
        hop_itemsize=4,
    )


def byte_cases(files: list[Path] | None = None) -> list[Case]:
    """Bytes out of a node in a step of MiCS, counted and ours, for every partition in the files."""
    cases = []
    for path in files or sorted(RESULTS.glob("bytes_*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        run = read["configuration"]
        if run["workload"]["kind"] != "linears":
            continue
        for row in read["rows"]:
            if row["system"] != "mics":
                continue
            ours = linears_traffic(run, row).inter_node_bytes / run["num_nodes"]
            name = f"mics over {row['partition_nodes']:g} nodes ({path.name})"
            counted = row["inter_node_bytes_per_step"]
            cases.append(Case(name=name, published=counted, predicted=ours))
    return cases
