"""Count the collectives that this rank takes part in, their bytes and their groups.

torch's CommDebugMode fails with an IndexError from the second forward of an FSDP2 model on (torch
2.13.0), and knows neither bytes nor groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mics_dtensor.topology import Topology

RESULT = -1  # the message is what the operator returns

# operator of c10d: (kind, the argument that is the whole message, the argument that is the group)
EAGER = {
    "_allgather_base_": ("all_gather", 0, 2),
    "allgather_": ("all_gather", 0, 2),
    "allgather_coalesced_": ("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "alltoall_base_": ("all_to_all", 1, 2),
    "alltoall_": ("all_to_all", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "gather_": ("gather", 1, 2),  # what this rank gives
    "scatter_": ("scatter", 0, 2),  # what this rank gets
    "send": ("send", 0, 1),
}
# operator of _c10d_functional: (kind, message); the name of the group is the last string
FUNCTIONAL = {
    "all_gather_into_tensor": ("all_gather", RESULT),
    "all_gather_into_tensor_out": ("all_gather", RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
}
# A message is counted where it is sent.
NO_MESSAGE = {"recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
BARRIERS = {"barrier", "monitored_barrier_"}


@dataclass(frozen=True)
class Collective:
    """One call. `message_bytes` is the whole message as this rank holds it.

    All-gather: the gathered output; reduce-scatter and all-to-all: the input; all-reduce and
    broadcast: the tensor. A ring of n ranks then takes (n - 1)/n of it out of each rank, twice for
    an all-reduce.
    """

    kind: str
    message_bytes: int
    ranks: tuple[int, ...]  # of its group, in the group's order


@dataclass
class Collectives:
    """What was called while `count_collectives` was open, in the order of the calls."""

    calls: list[Collective] = field(default_factory=list)

    @property
    def all_gathers(self) -> int:
        return self.num("all_gather")

    @property
    def reduce_scatters(self) -> int:
        return self.num("reduce_scatter")

    @property
    def all_reduces(self) -> int:
        return self.num("all_reduce")

    @property
    def broadcasts(self) -> int:
        return self.num("broadcast")

    @property
    def all_to_alls(self) -> int:
        return self.num("all_to_all")

    @property
    def by_kind(self) -> dict[str, int]:
        """Calls by kind: equality with a dict says that nothing else was called."""
        return dict(Counter(call.kind for call in self.calls))

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Message bytes by kind."""
        kinds = dict.fromkeys(call.kind for call in self.calls)
        return {kind: self.message_bytes(kind) for kind in kinds}

    def num(self, kind: str, *, ranks: Sequence[int] | None = None) -> int:
        """Calls of a kind, in the group of `ranks` alone if given."""
        return len(self.of(kind, ranks=ranks))

    def message_bytes(self, kind: str, *, ranks: Sequence[int] | None = None) -> int:
        """Bytes of the messages of a kind, in the group of `ranks` alone if given."""
        return sum(call.message_bytes for call in self.of(kind, ranks=ranks))

    def of(self, kind: str, *, ranks: Sequence[int] | None = None) -> list[Collective]:
        """The calls of a kind, in the group of `ranks` alone if given."""
        return [
            call
            for call in self.calls
            if call.kind == kind and (ranks is None or call.ranks == tuple(ranks))
        ]


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count every collective of this rank, the backward's too; not the replays of a CUDA graph."""
    counted = Collectives()
    with _CountingMode(counted):
        yield counted


def sent_bytes(counted: Collectives, topology: Topology) -> tuple[int, int]:
    """Out of all nodes, and inside nodes: what the best algorithm sends for what was called.

    From the counted messages alone: a ring of n ranks takes (n - 1)/n of a message over each edge.
    """
    between = inside = 0.0
    for call in counted.calls:
        size = len(call.ranks)
        nodes = len({topology.node_of(rank) for rank in call.ranks})
        if call.kind == "send":  # to a rank at this place in another node
            assert nodes == size
            between += call.message_bytes
            continue
        edges_between = nodes if nodes > 1 else 0
        edges_inside = (size if size > 1 else 0) - edges_between
        twice = 2 if call.kind == "all_reduce" else 1
        per_edge = twice * call.message_bytes * (size - 1) / size
        between += edges_between * per_edge / size  # reported by each of its ranks
        inside += edges_inside * per_edge / size
    both = torch.tensor([between, inside], dtype=torch.float64)
    dist.all_reduce(both)
    return round(both[0].item()), round(both[1].item())


class _CountingMode(TorchDispatchMode):
    def __init__(self, counted: Collectives) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor first: its local operators come back here
        result = func(*args, **(kwargs or {}))
        namespace = getattr(func, "namespace", "")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            call = _collective(namespace, func._overloadpacket.__name__, args, result)
            if call is not None:
                self.counted.calls.append(call)
        return result


def _collective(
    namespace: str, operator: str, args: Sequence[Any], result: object
) -> Collective | None:
    if operator in NO_MESSAGE:
        return None
    if operator in BARRIERS:
        return Collective("barrier", 0, _ranks(dist.ProcessGroup.unbox(args[1])))
    if namespace == "c10d" and operator in EAGER:
        kind, message, group = EAGER[operator]
        ranks = _ranks(dist.ProcessGroup.unbox(args[group]))
    elif namespace != "c10d" and operator in FUNCTIONAL:
        kind, message = FUNCTIONAL[operator]
        name = [arg for arg in args if isinstance(arg, str)][-1]
        ranks = _ranks(dist.distributed_c10d._resolve_process_group(name))
    else:
        raise NotImplementedError(f"{namespace}.{operator} has no line in the tables of this file")
    return Collective(kind, _bytes(result if message == RESULT else args[message]), ranks)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _bytes(message: object) -> int:
    if isinstance(message, torch.Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, Sequence):
        return sum(_bytes(part) for part in message)
    raise TypeError(f"a message is a tensor or a sequence of them, not {type(message).__name__}")
