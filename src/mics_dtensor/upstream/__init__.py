"""Every private torch name that this library leans on: the single door.

Checked on torch 2.11.0, 2.13.0 and 2.14.1; `tests/ranks/test_upstream.py` holds a canary for each
name. The rest of the library sees a `Unit`: one FSDP2 parameter group, the parameters that are
gathered and reduced in one message.
"""

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from mics_dtensor.upstream.comm import (
    all_gather,
    coalescing,
    norms_of,
    reduce_scatter,
    scale_,
    set_timeout,
    timeout_of,
)
from mics_dtensor.upstream.exchange import first_hop_only, reset_after_exception, whole_units
from mics_dtensor.upstream.piece import Box, Piece, boxes_of
from mics_dtensor.upstream.reshard import (
    can_reshard_over_smaller_group,
    reshard_after_forward_over,
)
from mics_dtensor.upstream.storage import (
    add_hook,
    as_summand,
    flat_shard,
    hooks_of,
    is_replaced,
    mesh_of_parameter,
    place_of_shard,
    run_load_hooks,
)
from mics_dtensor.upstream.tracing import is_profiling
from mics_dtensor.upstream.units import ShardedParameter, Unit, local_of, units_of

__all__ = [
    "AllGather",
    "Box",
    "Piece",
    "ReduceScatter",
    "ShardedParameter",
    "Unit",
    "add_hook",
    "all_gather",
    "as_summand",
    "boxes_of",
    "can_reshard_over_smaller_group",
    "coalescing",
    "first_hop_only",
    "flat_shard",
    "hooks_of",
    "is_profiling",
    "is_replaced",
    "local_of",
    "mesh_of_parameter",
    "norms_of",
    "place_of_shard",
    "reduce_scatter",
    "reset_after_exception",
    "reshard_after_forward_over",
    "run_load_hooks",
    "scale_",
    "set_timeout",
    "timeout_of",
    "units_of",
    "whole_units",
]
