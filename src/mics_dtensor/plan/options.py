"""How a step is run, and the sizes that decide which messages go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mics_dtensor.layout import GroupShape

BUCKET_SIZE_BYTES = 2**20
"""Units smaller than this share a message at the boundary.

Measured (benchmarks/results, `crossover`): from 512 KiB on a message for all is no faster, as the
copy costs what the fewer messages save; twice that, for links that are faster than those.
"""

WHOLE_BLOCK_BYTES = 2**19
"""On gloo the stages of a unit whose block of a node is no larger are one call each, the
blocks put in order by a copy; those of a larger one go block by block, each stage working while
the other waits (gloo.py).

Measured (benchmarks/results, `blocks`): below it calls cost more than what they would hide.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a step is run."""

    num_micro_steps: int = 1
    hierarchical: bool = True
    two_hop: bool = True  # False: all-reduce in every micro-step, as HSDP does
    bucket_size_bytes: int = BUCKET_SIZE_BYTES
    overlap_update: bool = False  # the gather of slices beside the next forward: the same bytes
    backend: Literal["nccl", "gloo"] = "nccl"

    def in_stages(self, group: GroupShape) -> bool:
        """Whether what is sent over such groups goes between nodes and within them apart."""
        return self.hierarchical and group.has_two_levels

    def calls_within(self, group: GroupShape, *, block_bytes: int) -> tuple[int, int]:
        """Calls of a stage inside the node, and how many of them are launched as one.

        `block_bytes` are those of one node's ranks.
        """
        if self.backend == "nccl":
            return group.num_nodes, group.num_nodes
        return (1 if block_bytes <= WHOLE_BLOCK_BYTES else group.num_nodes), 1
