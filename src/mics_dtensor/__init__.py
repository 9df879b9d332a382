"""MiCS (arXiv 2205.00119) on PyTorch FSDP2: large models across slow links.

The contents page, in reading order. Names load on first use, so planning needs no torch; what is
not listed here may change tomorrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mics_dtensor.accumulate import gradient_accumulation
    from mics_dtensor.apply import apply_mics
    from mics_dtensor.checkpoint.checkpoints import CheckpointOptions, Checkpoints
    from mics_dtensor.clip import clip_grad_norm_
    from mics_dtensor.collectives import HierarchicalAllGather, HierarchicalReduceScatter
    from mics_dtensor.errors import MicsError
    from mics_dtensor.explanation import explain
    from mics_dtensor.layout import Layout
    from mics_dtensor.mesh import init_mesh
    from mics_dtensor.replicas import check_replicas, synchronize_replicas
    from mics_dtensor.sharded_states import ReplicaShardedOptimizer
    from mics_dtensor.topology import Topology

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  in reading order, not the alphabet's
    "Topology",
    "Layout",
    "init_mesh",
    "apply_mics",
    "synchronize_replicas",
    "check_replicas",
    "gradient_accumulation",
    "clip_grad_norm_",
    "explain",
    "ReplicaShardedOptimizer",
    "Checkpoints",
    "CheckpointOptions",
    "HierarchicalAllGather",
    "HierarchicalReduceScatter",
    "MicsError",
]

_HOME = {
    "Topology": "topology",
    "Layout": "layout",
    "init_mesh": "mesh",
    "apply_mics": "apply",
    "synchronize_replicas": "replicas",
    "check_replicas": "replicas",
    "gradient_accumulation": "accumulate",
    "clip_grad_norm_": "clip",
    "explain": "explanation",
    "ReplicaShardedOptimizer": "sharded_states",
    "Checkpoints": "checkpoint.checkpoints",
    "CheckpointOptions": "checkpoint.checkpoints",
    "HierarchicalAllGather": "collectives",
    "HierarchicalReduceScatter": "collectives",
    "MicsError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
