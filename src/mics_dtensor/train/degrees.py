"""Degrees of parallelism: from what is written and the world to numbers, and the Layout they make.

Pure: world size, ranks of a host and host names are handed in. Axes of torchtitan's mesh from slow
to fast: pp, dp_replicate, dp_shard, cp, tp. A parameter has dp_shard x cp shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mics_dtensor.errors import ConfigError, PlanError
from mics_dtensor.layout import Layout, divisors, partition_sizes
from mics_dtensor.topology import Topology
from mics_dtensor.train.key import replace_at, value_at
from mics_dtensor.train.layout_limits import refuse_on_layout
from mics_dtensor.train.load import Run
from mics_dtensor.train.pipeline import refuse_pipelines
from mics_dtensor.train.planning import recommended_partition_size

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
BY_PLANNER = "the planner"  # the origin of a partition size that was "auto"


def resolve(
    run: Run,
    *,
    world_size: int,
    local_world_size: int | None = None,
    hosts: Sequence[str] | None = None,
) -> tuple[Run, Layout]:
    """The run with every degree a number, and the Layout of its partition groups.

    `local_world_size` is the launcher's number of ranks on a host, `hosts[rank]` a host's name; the
    node of a rank follows from [mics] ranks_per_node, else from the first, and where both are known
    they must agree. With pipeline parallelism the Layout is that of one stage: the axis pp is the
    slowest, so that a stage is world_size / pp consecutive ranks. Raises ConfigError.
    """
    ranks_per_node = _ranks_per_node(run, local_world_size=local_world_size, hosts=hosts)
    parallelism = run.config.parallelism
    pp = parallelism.pipeline_parallel_degree
    cp = parallelism.context_parallel_degree
    tp = parallelism.tensor_parallel_degree
    ep = parallelism.expert_parallel_degree
    if world_size % (pp * cp * tp):
        raise ConfigError(
            f"pipeline x context x tensor parallel degree = {pp} x {cp} x {tp} = {pp * cp * tp} "
            f"does not divide the {world_size} ranks of the world; start a multiple of "
            f"{pp * cp * tp} ranks, or lower a degree"
        )
    refuse_pipelines(run.config)
    topology = _stage_topology(world_size, stages=pp, ranks_per_node=ranks_per_node)
    ranks = world_size // (pp * cp * tp)
    if run.config.mics.partition_size == "auto":
        run = _chosen(run, topology)
    if run.config.mics.partition_size is None:
        run = _fill_from_world(run, ranks)
    else:
        run = _fill_from_partition_size(run, ranks, topology)
    _, shard = _degrees(run)
    layout = Layout(topology=topology, partition_size=shard * cp, tensor_parallel_size=tp)
    if (shard * cp * tp) % ep:
        raise ConfigError(
            f"expert_parallel_degree {ep} does not divide the {shard * cp * tp} ranks of a "
            f"partition group; choose from {divisors(shard * cp * tp)}"
        )
    num_micro_steps(run)
    refuse_on_layout(run.config, layout)
    return run, layout


def written_partition_size(run: Run, topology: Topology) -> int | None:
    """What the file itself says for data and tensor parallelism on these nodes.

    None for "auto", and for a size that there is not on so many nodes. Raises ConfigError for
    degrees that contradict it, or the world.
    """
    size, tp = run.config.mics.partition_size, run.config.parallelism.tensor_parallel_degree
    ranks = topology.world_size // tp
    if size is None:
        return _degrees(_fill_from_world(run, ranks))[1]
    if isinstance(size, int) and size not in partition_sizes(topology, tensor_parallel_size=tp):
        return None
    if size == "auto":
        return None
    return _degrees(_fill_from_partition_size(run, ranks, topology))[1]


def num_micro_steps(run: Run) -> int:
    """Micro-steps of an optimizer step; `run` is resolved. Raises ConfigError."""
    training = run.config.training
    replicate, shard = _degrees(run)
    at_once = training.local_batch_size * replicate * shard
    if training.global_batch_size < 0:
        return 1
    if training.global_batch_size == 0 or training.global_batch_size % at_once:
        raise ConfigError(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of "
            f"local_batch_size x data-parallel ranks = {training.local_batch_size} x "
            f"{replicate * shard} = {at_once}; write such a multiple, or -1 for one micro-step"
        )
    return training.global_batch_size // at_once


def _degrees(run: Run) -> tuple[int, int]:
    parallelism = run.config.parallelism
    return parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree


def _ranks_per_node(run: Run, *, local_world_size: int | None, hosts: Sequence[str] | None) -> int:
    said = run.config.mics.ranks_per_node
    by_host = None
    if hosts is not None:
        of_hosts = Topology.from_hosts(hosts)
        if not of_hosts.is_contiguous:
            raise ConfigError(
                f"the ranks of a host must be consecutive; {of_hosts.names[0]} holds "
                f"{list(of_hosts.nodes[0][:4])}...: start the ranks host by host (torchrun's "
                "--node-rank in the order of the hosts, with --master-addr, since the c10d "
                "rendezvous numbers hosts as they come)"
            )
        by_host = of_hosts.ranks_per_node
    if said is not None:
        return said
    if local_world_size is None and by_host is None:
        raise ConfigError(
            "how many ranks share a node? write [mics] ranks_per_node, or start the ranks with "
            "torchrun, which says it"
        )
    if None not in (local_world_size, by_host) and local_world_size != by_host:
        raise ConfigError(
            f"the launcher says {local_world_size} ranks on a host, the host names say {by_host}; "
            "write [mics] ranks_per_node with the one that is true"
        )
    return local_world_size or by_host or 1


def _stage_topology(world_size: int, *, stages: int, ranks_per_node: int) -> Topology:
    """The nodes of one pipeline stage: whole nodes, or a part of one."""
    whole = Topology.uniform(world_size=world_size, ranks_per_node=ranks_per_node)
    if stages == 1:
        return whole
    ranks = world_size // stages
    if ranks % ranks_per_node and ranks_per_node % ranks:
        raise ConfigError(
            f"pipeline_parallel_degree {stages} makes stages of {ranks} ranks, which cross nodes "
            f"of {ranks_per_node} unevenly; a stage must be whole nodes, or divide one"
        )
    return Topology.uniform(world_size=ranks, ranks_per_node=min(ranks, ranks_per_node))


def _chosen(run: Run, topology: Topology) -> Run:
    """The partition size that the planner recommends; pure, so that every rank finds the same."""
    try:
        size, why = recommended_partition_size(run.config, topology)
    except PlanError as error:
        raise ConfigError(f'[mics] partition_size = "auto": {error}') from error
    run = _filled(run, {"mics.partition_size": size}, by=BY_PLANNER)
    return dataclasses.replace(run, planned=why)


def _fill_from_world(run: Run, ranks: int) -> Run:
    """Without [mics] partition_size the file's own degrees decide, as in torchtitan 0.2."""
    replicate, shard = _degrees(run)
    if replicate < 1:
        raise ConfigError(
            f"{REPLICATE} = {replicate}; only [mics] partition_size fills it: write that key, or "
            "1 or more here"
        )
    if shard == -1 and ranks % replicate == 0:
        return _filled(run, {SHARD: ranks // replicate}, by="the number of ranks")
    if shard < 1 or replicate * shard != ranks:
        raise ConfigError(
            f"data_parallel_replicate_degree {replicate} x data_parallel_shard_degree {shard} "
            f"is not the {ranks} ranks that are left for data parallelism; write -1 for the "
            f"latter, and for the former one of {divisors(ranks)}"
        )
    return run


def _fill_from_partition_size(run: Run, ranks: int, topology: Topology) -> Run:
    parallelism = run.config.parallelism
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    size = run.config.mics.partition_size
    said = f"[mics] partition_size = {size!r}".replace("'", '"')
    if size == "node":
        size = topology.ranks_per_node // tp
    if not isinstance(size, int):
        raise ConfigError(f'{said}; write "node" or a number of ranks')
    Layout(topology=topology, partition_size=size, tensor_parallel_size=tp)
    if size % cp:
        raise ConfigError(
            f"{said} is not a multiple of context_parallel_degree {cp}, whose ranks share the "
            "shards of a partition group"
        )
    wanted = {SHARD: size // cp, REPLICATE: ranks // (size // cp)}
    for name, value in zip((REPLICATE, SHARD), _degrees(run), strict=True):
        written = run.origin[name] != "default"
        if written and value not in (-1, wanted[name]):
            raise ConfigError(
                f"{name} = {value} ({run.origin[name]}) contradicts {said}, which makes it "
                f"{wanted[name]}; delete the line {name.rpartition('.')[2]} = {value}, or write -1"
            )
    return _filled(run, wanted, by="[mics] partition_size")


def _filled(run: Run, values: Mapping[str, int], *, by: str) -> Run:
    config, origin = run.config, dict(run.origin)
    for name, value in values.items():
        if value != value_at(config, name):
            config = replace_at(config, name, value)
            origin[name] = by
    return dataclasses.replace(run, config=config, origin=origin)
