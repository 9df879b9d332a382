"""What cannot be together on the partition groups that a run has come to. Pure."""

from __future__ import annotations

from mics_dtensor.errors import ConfigError
from mics_dtensor.layout import Layout
from mics_dtensor.train.config import RunConfig


def refuse_on_layout(config: RunConfig, layout: Layout) -> None:
    """Raises ConfigError for keys that contradict each other on these groups and replicas."""
    mics, saved = config.mics, config.checkpoint
    degree, nodes = layout.tensor_parallel_size, layout.nodes_per_partition_group
    if mics.node_local_backward and degree > 1 and nodes > 1:
        raise ConfigError(
            "mics.node_local_backward = true needs plain parameters, and "
            f"tensor_parallel_degree {degree} makes DTensors, which torch cannot reshard to a "
            f"smaller group; delete the line, or choose a partition group of one node, not {nodes}"
        )
    sliced = mics.optimizer_over_replicas and layout.num_replicas > 1
    saves = saved.enable and not saved.load_only
    if sliced and saves and mics.checkpoint_placement == "partition_group":
        raise ConfigError(
            'mics.checkpoint_placement = "partition_group" wants a whole copy in one group, and '
            f"mics.optimizer_over_replicas = true cuts states over {layout.num_replicas} replicas: "
            'write "spread", on a disk that all nodes share, or delete one of the lines'
        )
