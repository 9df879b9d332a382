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
from mics_dtensor.upstream.exchange import (
    first_hop_only,
    owe,
    owed,
    reduce_alone,
    reset_after_exception,
    show_shards,
    whole_units,
)
from mics_dtensor.upstream.full_state import full_state_is_asked
from mics_dtensor.upstream.parameter import ShardedParameter
from mics_dtensor.upstream.piece import Box, Piece, boxes_of
from mics_dtensor.upstream.reshard import (
    can_reshard_over_smaller_group,
    reshard_after_forward_over,
)
from mics_dtensor.upstream.saved import tensor_in_place
from mics_dtensor.upstream.storage import (
    add_hook,
    as_summand,
    flat_shard,
    hooks_of,
    is_replaced,
    lay_end_to_end,
    lies_end_to_end,
    mesh_of_parameter,
    narrow_parameters,
    place_of_shard,
    rewrites_state_dict,
    run_load_hooks,
    storage_info,
    version_of,
)
from mics_dtensor.upstream.tracing import is_profiling
from mics_dtensor.upstream.units import Unit, local_of, units_of
from mics_dtensor.upstream.unshard import (
    before_unshard,
    do_before_unshard,
    set_post_optim_event,
)

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
    "before_unshard",
    "boxes_of",
    "can_reshard_over_smaller_group",
    "coalescing",
    "do_before_unshard",
    "first_hop_only",
    "flat_shard",
    "full_state_is_asked",
    "hooks_of",
    "is_profiling",
    "is_replaced",
    "lay_end_to_end",
    "lies_end_to_end",
    "local_of",
    "mesh_of_parameter",
    "narrow_parameters",
    "norms_of",
    "owe",
    "owed",
    "place_of_shard",
    "reduce_alone",
    "reduce_scatter",
    "reset_after_exception",
    "reshard_after_forward_over",
    "rewrites_state_dict",
    "run_load_hooks",
    "scale_",
    "set_post_optim_event",
    "set_timeout",
    "show_shards",
    "storage_info",
    "tensor_in_place",
    "timeout_of",
    "units_of",
    "version_of",
    "whole_units",
]
